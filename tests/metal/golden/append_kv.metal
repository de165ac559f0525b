// grid (32, 3, 2) threadgroup (32, 1, 1)
// Shared by the verify and score kernels: SIMD-group fragments, staging of cache rows, the online softmax over one key tile.
// Axes: B sequences, T query rows, R = g * T rows packed as r = t * g + head-in-group, D head dim, BK keys a tile.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#define LOWEST -3.0e38f   // not -INFINITY: a split without a visible key would compute inf - inf
#define PAD 8             // elements between staged rows, against bank conflicts

// lengths, num_tokens and counts may be a pointer in either address space or, when 0-d, a reference.
inline int item(int x, int) { return x; }
template <typename P>
inline int item(P x, int i) { return x[i]; }

// Lane -> row and first of two columns of an 8x8 fragment (the map MLX's own kernels rely on).
inline ushort fragment_row(ushort lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
inline ushort fragment_column(ushort lane) { return ((lane >> 2) & 2) * 2 + (lane & 1) * 2; }

typedef simdgroup_matrix<float, 8, 8> Fragment;

// Dense: key j is cache row j. In-flight rows follow the committed ones.
struct AllTokens {
  int committed;
  int at(int j) const { return j; }
};

// Sparse: the first `committed` keys are the selected rows, the in-flight rows N, N + 1, ... follow.
template <typename P>
struct SelectedTokens {
  int committed;
  int length;
  P indices;
  int at(int j) const { return j < committed ? indices[j] : length + j - committed; }
};
template <typename P>
inline SelectedTokens<P> selected_tokens(P indices, int committed, int length) {
  SelectedTokens<P> s;
  s.committed = committed;
  s.length = length;
  s.indices = indices;
  return s;
}

// One cache row of D elements, by all lanes of a SIMD-group; row < 0 stores zeros, since a stale NaN times zero is NaN.
template <typename T, int D>
inline void stage_row(const device T* source, long offset, bool present, threadgroup T* target, ushort lane) {
  constexpr int W = D % 128 == 0 ? 4 : 2;
  for (int d = lane * W; d < D; d += 32 * W) {
    vec<T, W> x = vec<T, W>(T(0));
    if (present) x = *(const device vec<T, W>*)(source + offset + d);
    *(threadgroup vec<T, W>*)(target + d) = x;
  }
}

// Keys [first, first + BK) of the token list. A lane looks up one token, so every index is read once a threadgroup.
template <typename T, int D, int BK, bool VALUES, typename Tokens>
inline void stage_tile(const device T* k, const device T* v, long k_stride, long v_stride, Tokens tokens, int first, int total,
                       threadgroup T* k_tile, threadgroup T* v_tile, ushort lane, ushort group, ushort groups) {
  const int own = group + lane * groups;
  const int mine = own < BK && first + own < total ? tokens.at(first + own) : -1;
  ushort source = 0;
  for (int row = group; row < BK; row += groups) {
    const int token = simd_shuffle(mine, source);
    source += 1;
    stage_row<T, D>(k, long(token) * k_stride, token >= 0, k_tile + row * (D + PAD), lane);
    if (VALUES) stage_row<T, D>(v, long(token) * v_stride, token >= 0, v_tile + row * (D + PAD), lane);
  }
}

// 8 packed query rows in registers, multiplied by the scale; rows at or beyond `rows` are zero.
template <typename T, int D>
inline void load_queries(const device T* q, bool present, float scale, thread Fragment* out, ushort lane) {
  const ushort column = fragment_column(lane);
  for (int i = 0; i < D / 8; ++i) {
    out[i].thread_elements()[0] = present ? float(q[i * 8 + column]) * scale : 0.0f;
    out[i].thread_elements()[1] = present ? float(q[i * 8 + column + 1]) * scale : 0.0f;
  }
}

// scores[j] = 8 query rows x 8 keys (keys j*8..), from the staged K tile.
template <typename T, int D, int BK>
inline void query_key(thread Fragment* q, threadgroup T* k_tile, thread Fragment* scores, ushort lane) {
  const ushort row = fragment_row(lane), column = fragment_column(lane);
  for (int j = 0; j < BK / 8; ++j) {
    scores[j] = Fragment(0.0f);
    threadgroup T* keys = k_tile + (j * 8 + column) * (D + PAD) + row;
    for (int i = 0; i < D / 8; ++i) {
      Fragment key;
      key.thread_elements()[0] = float(keys[i * 8]);
      key.thread_elements()[1] = float(keys[i * 8 + D + PAD]);
      simdgroup_multiply_accumulate(scores[j], q[i], key, scores[j]);
    }
  }
}

// Running softmax of a lane's row, in base 2: `top` the maximum so far, `sum` of exp2(score - top).
struct RowState {
  float top;
  float sum;
};

// Fold one tile into the state and the output accumulators; key j of the tile is list position first + j.
template <typename T, int D, int BK>
inline void fold_tile(thread Fragment* scores, threadgroup T* v_tile, int first, int committed, int total, int step,
                      thread RowState& state, thread Fragment* out, ushort lane) {
  const ushort row = fragment_row(lane), column = fragment_column(lane);
  float top = LOWEST;
  for (int j = 0; j < BK / 8; ++j)
    for (int e = 0; e < 2; ++e) {
      const int key = first + j * 8 + column + e;
      const bool seen = key < total && key - committed <= step;  // committed keys, then in-flight rows 0..step
      if (!seen) scores[j].thread_elements()[e] = LOWEST;
      top = max(top, float(scores[j].thread_elements()[e]));
    }
  top = max(top, simd_shuffle_xor(top, ushort(1)));  // the four lanes of a row differ in bits 0 and 3
  top = max(top, simd_shuffle_xor(top, ushort(8)));
  top = max(top, state.top);
  const float fade = exp2(state.top - top);
  float sum = 0.0f;
  for (int j = 0; j < BK / 8; ++j)
    for (int e = 0; e < 2; ++e) {
      const float s = scores[j].thread_elements()[e];
      const float p = s > 0.5f * LOWEST ? exp2(s - top) : 0.0f;
      scores[j].thread_elements()[e] = p;
      sum += p;
    }
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(8));
  state.sum = state.sum * fade + sum;
  state.top = top;
  for (int i = 0; i < D / 8; ++i) {
    out[i].thread_elements()[0] *= fade;
    out[i].thread_elements()[1] *= fade;
    for (int j = 0; j < BK / 8; ++j) {
      threadgroup T* value = v_tile + (j * 8 + row) * (D + PAD) + i * 8 + column;
      Fragment v;
      v.thread_elements()[0] = float(value[0]);
      v.thread_elements()[1] = float(value[1]);
      simdgroup_multiply_accumulate(out[i], scores[j], v, out[i]);
    }
  }
}

// Where a threadgroup works: grid (splits, B * Hkv, row blocks), strips of 8 rows, one a SIMD-group.
struct Place {
  int b, head, split, splits, strip, rows, group_size, num_rows, kv_heads;
  bool computes;
};
inline Place find_place(uint3 at, uint3 grid, ushort group, int num_rows, int heads, int kv_heads) {
  Place p;
  p.kv_heads = kv_heads;
  p.b = int(at.y) / kv_heads;
  p.head = int(at.y) % kv_heads;
  p.split = at.x;
  p.splits = grid.x;
  p.group_size = heads / kv_heads;
  p.num_rows = num_rows;
  p.rows = num_rows * p.group_size;
  const int strips = (p.rows + 7) / 8;
  const int block = (strips + int(grid.z) - 1) / int(grid.z);
  p.strip = int(at.z) * block + group;
  p.computes = group < block && p.strip < strips;
  return p;
}

// Attention of one strip over this split's keys. DIRECT writes q's dtype to `out` [B, T, Hq, D]; otherwise fp32 partial sums
// to `partial` [B, Hkv, splits, R, D] and (top, sum) to `stats` [B, Hkv, splits, R, 2].
template <typename T, int D, int BK, bool DIRECT, typename Tokens>
inline void attend(const device T* q, const device T* k, const device T* v, long k_stride, long v_stride, Tokens tokens, int valid,
                   float scale, Place p, threadgroup T* k_tile, threadgroup T* v_tile, device T* out, device float* partial,
                   device float* stats, ushort lane, ushort group, ushort groups) {
  const int r = p.strip * 8 + fragment_row(lane), step = r / p.group_size;
  const bool live = p.computes && r < p.rows && step < valid;
  const long row_offset = (long(p.b * p.num_rows + step) * p.kv_heads + p.head) * p.group_size + r % p.group_size;
  Fragment queries[D / 8], sums[D / 8];
  load_queries<T, D>(q + row_offset * D, live, scale * 1.44269504f, queries, lane);
  for (int i = 0; i < D / 8; ++i) sums[i] = Fragment(0.0f);
  RowState state;
  state.top = LOWEST;
  state.sum = 0.0f;
  const int total = valid > 0 ? tokens.committed + valid : 0;
  const int tiles = (total + BK - 1) / BK, share = (tiles + p.splits - 1) / p.splits;
  const int last = min(tiles, (p.split + 1) * share);
  const bool busy = p.computes && p.strip * 8 < valid * p.group_size;
  for (int tile = p.split * share; tile < last; ++tile) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before is used up
    stage_tile<T, D, BK, true>(k, v, k_stride, v_stride, tokens, tile * BK, total, k_tile, v_tile, lane, group, groups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy) {
      Fragment scores[BK / 8];
      query_key<T, D, BK>(queries, k_tile, scores, lane);
      fold_tile<T, D, BK>(scores, v_tile, tile * BK, tokens.committed, total, step, state, sums, lane);
    }
  }
  if (!p.computes || r >= p.rows) return;
  const ushort column = fragment_column(lane);
  const long slot = (long(p.b * p.kv_heads + p.head) * p.splits + p.split) * p.rows + r;
  const bool empty = p.split * share >= last;  // such a split leaves its partial sums unwritten: combine skips it
  const float norm = DIRECT && live ? 1.0f / state.sum : 1.0f;
  for (int i = 0; i < D / 8; ++i)
    for (int e = 0; e < 2; ++e) {
      const float x = live ? sums[i].thread_elements()[e] * norm : 0.0f;
      if (DIRECT) out[row_offset * D + i * 8 + column + e] = T(x);
      else if (!empty && live) partial[slot * D + i * 8 + column + e] = x;
    }
  if (!DIRECT && column == 0) {
    stats[slot * 2] = live ? state.top : LOWEST;
    stats[slot * 2 + 1] = live ? state.sum : 0.0f;
  }
}

// An 8x8 fragment of a cache block, keys down (values) or, transposed, keys across (keys of q.K^T). Fewer than 8 valid keys
// are read one by one and the rest is zero: beyond them lie stale rows or the end of the buffer.
template <typename T, bool TRANSPOSE>
inline void block_fragment(const device T* source, long stride, int keys, thread Fragment& out, ushort lane) {
  if (keys >= 8) {
    simdgroup_matrix<T, 8, 8> raw;
    simdgroup_load(raw, source, ulong(stride), ulong2(0), TRANSPOSE);
    out.thread_elements()[0] = float(raw.thread_elements()[0]);
    out.thread_elements()[1] = float(raw.thread_elements()[1]);
    return;
  }
  const int row = fragment_row(lane), column = fragment_column(lane);
  for (int e = 0; e < 2; ++e) {
    const int key = TRANSPOSE ? column + e : row, d = TRANSPOSE ? row : column + e;
    float x = 0.0f;
    if (key < keys) x = float(source[key * stride + d]);
    out.thread_elements()[e] = x;
  }
}

// The output of a split, in the two forms of `attend`.
template <typename T, bool DIRECT>
inline void write_sum(device T* out, device float* partial, device float* stats, long at, long slot, float x, bool used) {
  if (DIRECT) out[at] = T(x);
  else if (used) partial[slot] = x;
}
template <typename T, bool DIRECT>
inline void write_stats(device T* out, device float* partial, device float* stats, long slot, float top, float sum) {
  stats[slot] = top;
  stats[slot + 1] = sum;
}
template <typename T>
[[kernel]] void custom_kernel_dustin_append_kv_8890c19f4c4e__float16_t_float16_t_float16_t_float16_t_float16_t_int32_tc_int32_tc_int32_t_int32_t(
  const device float16_t* k_cache [[buffer(0)]],
  const constant int* k_cache_shape [[buffer(1)]],
  const constant int64_t* k_cache_strides [[buffer(2)]],
  const device float16_t* v_cache [[buffer(3)]],
  const constant int64_t* v_cache_strides [[buffer(4)]],
  const device float16_t* k_new [[buffer(5)]],
  const constant int* k_new_shape [[buffer(6)]],
  const device float16_t* v_new [[buffer(7)]],
  const constant int32_t* lengths [[buffer(8)]],
  const constant int32_t* num_tokens [[buffer(9)]],
  device int32_t* starts [[buffer(10)]],
  device int32_t* ends [[buffer(11)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// New rows into the cache IN PLACE at lengths[b] ... lengths[b] + num_tokens[b] - 1. `starts` [B] repeats the lengths: attention
// that reads `starts` is ordered after the writes. `ends` [B] gets the new lengths, or -1 when the rows do not fit (then none
// of them is written). Threadgroups (., T, B), a thread four elements of a token's row.
// writes: k_cache v_cache
const int t = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int head_dim = k_new_shape[3], row = k_new_shape[2] * head_dim, e = int(thread_position_in_grid.x) * 4;
const int valid = min(item(num_tokens, b), k_new_shape[1]), length = item(lengths, b);
const bool fits = length + valid <= k_cache_shape[1];
if (e == 0 && t == 0) {
  starts[b] = length;
  ends[b] = fits ? length + valid : -1;
}
if (e >= row || t >= valid || !fits) return;
const int head = e / head_dim, d = e % head_dim;
const long from = (long(b) * k_new_shape[1] + t) * row + e;
device T* keys = (device T*)(k_cache + b * k_cache_strides[0] + (length + t) * k_cache_strides[1] + head * k_cache_strides[2] + d);
device T* values = (device T*)(v_cache + b * v_cache_strides[0] + (length + t) * v_cache_strides[1] + head * v_cache_strides[2] + d);
*(device vec<T, 4>*)keys = *(const device vec<T, 4>*)(k_new + from);
*(device vec<T, 4>*)values = *(const device vec<T, 4>*)(v_new + from);

}

template [[host_name("custom_kernel_dustin_append_kv_8890c19f4c4e__float16_t_float16_t_float16_t_float16_t_float16_t_int32_tc_int32_tc_int32_t_int32_t")]] [[kernel]] decltype(custom_kernel_dustin_append_kv_8890c19f4c4e__float16_t_float16_t_float16_t_float16_t_float16_t_int32_tc_int32_tc_int32_t_int32_t<float16_t>) custom_kernel_dustin_append_kv_8890c19f4c4e__float16_t_float16_t_float16_t_float16_t_float16_t_int32_tc_int32_tc_int32_t_int32_t<float16_t>;
