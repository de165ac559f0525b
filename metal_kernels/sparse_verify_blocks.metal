// T in-flight rows over selected 16-token blocks, K and V straight from device memory by simdgroup_load, each row read once:
// a SIMD-group scores one block for all rows, then sums one slice of D for all rows. In-flight rows form blocks of their own.
// may stay unwritten: partial
constexpr int NS = 4, KT = 16 * NS, KP = KT + 4, COLUMNS = D / NS, STRIPS = RB / 8;
threadgroup T q_tile[RB * (D + PAD)];
threadgroup float s_tile[RB * KP];
threadgroup float tops[RB], totals[RB], fades[RB];
threadgroup int starts[NS], sizes[NS], flights[NS];
const ushort lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const ushort row_of = fragment_row(lane), column = fragment_column(lane);
const int num_rows = q_shape[1], heads = q_shape[2], kv_heads = k_shape[2], group_size = heads / kv_heads;
const int b = threadgroup_position_in_grid.y / kv_heads, head = threadgroup_position_in_grid.y % kv_heads;
const int split = threadgroup_position_in_grid.x, splits = threadgroups_per_grid.x;
const int all_rows = num_rows * group_size, first_row = threadgroup_position_in_grid.z * RB;
const int valid = min(item(num_tokens, b), num_rows), length = item(lengths, b);
const int live_rows = min(RB, min(all_rows, valid * group_size) - first_row);  // rows are packed, so the valid ones lead
const int strips = (live_rows + 7) / 8;
const int count = min(item(counts, b), blocks_shape[1]);
const int slots = valid > 0 ? count + (valid + 15) / 16 : 0;
const int tiles = (slots + NS - 1) / NS, share = (tiles + splits - 1) / splits, last = min(tiles, (split + 1) * share);
const long k_stride = k_strides[1], v_stride = v_strides[1];
const device T* keys = k + b * k_strides[0] + head * k_strides[2];
const device T* values = v + b * v_strides[0] + head * v_strides[2];
for (int r = group; r < RB; r += NS) {
  const int packed = first_row + r, step = packed / group_size;
  const long at = ((long(b) * num_rows + step) * heads + head * group_size + packed % group_size) * D;
  stage_row<T, D>(q, at, r < live_rows, q_tile + r * (D + PAD), lane);
  if (lane == 0) { tops[r] = LOWEST; totals[r] = 0.0f; }
}
Fragment sums[STRIPS * (COLUMNS / 8)];
for (int i = 0; i < STRIPS * (COLUMNS / 8); ++i) sums[i] = Fragment(0.0f);
for (int tile = split * share; tile < last && live_rows > 0; ++tile) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int slot = tile * NS + group;
  int start = 0, size = 0, flight = -1;
  if (slot < count) {
    start = blocks[b * blocks_shape[1] + slot] * 16;
    size = min(16, length - start);
  } else if (slot < slots) {
    flight = (slot - count) * 16;
    start = length + flight;
    size = min(16, valid - flight);
  }
  if (lane == 0) { starts[group] = start; sizes[group] = size; flights[group] = flight; }
  if (size > 0) {
    Fragment scores[STRIPS * 2];
    for (int i = 0; i < STRIPS * 2; ++i) scores[i] = Fragment(0.0f);
    for (int i = 0; i < D / 8; ++i) {
      Fragment key[2];
      for (int j = 0; j < 2; ++j)
        block_fragment<T, true>(keys + (start + j * 8) * k_stride + i * 8, k_stride, size - j * 8, key[j], lane);
      for (int s = 0; s < STRIPS; ++s) {
        if (s >= strips) break;
        Fragment query;
        threadgroup T* source = q_tile + (s * 8 + row_of) * (D + PAD) + i * 8 + column;
        query.thread_elements()[0] = float(source[0]);
        query.thread_elements()[1] = float(source[1]);
        simdgroup_multiply_accumulate(scores[s * 2], query, key[0], scores[s * 2]);
        simdgroup_multiply_accumulate(scores[s * 2 + 1], query, key[1], scores[s * 2 + 1]);
      }
    }
    for (int s = 0; s < STRIPS; ++s) {
      if (s >= strips) break;
      simdgroup_store(scores[s * 2], s_tile + s * 8 * KP + group * 16, KP);
      simdgroup_store(scores[s * 2 + 1], s_tile + s * 8 * KP + group * 16 + 8, KP);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = group; r < strips * 8; r += NS) {
    const int step = (first_row + r) / group_size;
    float s[2], top = LOWEST;
    for (int e = 0; e < 2; ++e) {
      const int c = lane + e * 32, in = c / 16;
      const bool seen = r < live_rows && c % 16 < sizes[in] && (flights[in] < 0 || flights[in] + c % 16 <= step);
      s[e] = seen ? s_tile[r * KP + c] * scale * 1.44269504f : LOWEST;
      top = max(top, s[e]);
    }
    top = max(simd_max(top), float(tops[r]));
    float sum = 0.0f;
    for (int e = 0; e < 2; ++e) {
      s[e] = s[e] > 0.5f * LOWEST ? exp2(s[e] - top) : 0.0f;
      s_tile[r * KP + lane + e * 32] = s[e];
      sum += s[e];
    }
    sum = simd_sum(sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);  // every lane has read tops[r]
    if (lane == 0) {
      fades[r] = exp2(tops[r] - top);
      totals[r] = totals[r] * fades[r] + sum;
      tops[r] = top;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int s = 0; s < STRIPS; ++s) {
    if (s >= strips) break;
    const float fade = fades[s * 8 + row_of];
    for (int c = 0; c < COLUMNS / 8; ++c) {
      sums[s * (COLUMNS / 8) + c].thread_elements()[0] *= fade;
      sums[s * (COLUMNS / 8) + c].thread_elements()[1] *= fade;
    }
  }
  for (int in = 0; in < NS; ++in)
    for (int j = 0; j < 2; ++j) {
      if (sizes[in] <= j * 8) continue;
      for (int c = 0; c < COLUMNS / 8; ++c) {
        Fragment value;
        block_fragment<T, false>(values + (starts[in] + j * 8) * v_stride + group * COLUMNS + c * 8, v_stride, sizes[in] - j * 8,
                                 value, lane);
        for (int s = 0; s < STRIPS; ++s) {
          if (s >= strips) break;
          Fragment p;
          threadgroup float* source = s_tile + (s * 8 + row_of) * KP + in * 16 + j * 8 + column;
          p.thread_elements()[0] = source[0];
          p.thread_elements()[1] = source[1];
          simdgroup_multiply_accumulate(sums[s * (COLUMNS / 8) + c], p, value, sums[s * (COLUMNS / 8) + c]);
        }
      }
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const bool empty = split * share >= last;
for (int s = 0; s < STRIPS; ++s) {
  const int r = s * 8 + row_of, packed = first_row + r, step = packed / group_size;
  if (packed >= all_rows) continue;
  const bool live = r < live_rows;
  const long slot = (long(b * kv_heads + head) * splits + split) * all_rows + packed;
  const long at = ((long(b) * num_rows + step) * heads + head * group_size + packed % group_size) * D;
  const float norm = DIRECT && live ? 1.0f / totals[r] : 1.0f;
  for (int c = 0; c < COLUMNS / 8; ++c)
    for (int e = 0; e < 2; ++e) {
      const int d = group * COLUMNS + c * 8 + column + e;
      const float x = live ? sums[s * (COLUMNS / 8) + c].thread_elements()[e] * norm : 0.0f;
      write_sum<T, DIRECT>(OUTPUTS, at + d, slot * D + d, x, !empty && live);
    }
  if (!DIRECT && group == 0 && column == 0)
    write_stats<T, DIRECT>(OUTPUTS, slot * 2, live ? float(tops[r]) : LOWEST, live ? float(totals[r]) : 0.0f);
}
