// Base-2 logits q.K * scale * log2(e) of the scoring heads over the committed rows, and each split's (top, sum of exp2).
// q [B, R, S, D]; `kv_heads` [G] names the KV head of a group, `slots` [G, H] its scoring heads (-1: none).
// may stay unwritten: logits
threadgroup T k_tile[BK * (D + PAD)];
const ushort lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup, groups = simdgroups_per_threadgroup;
const int head_groups = slots_shape[0], width = slots_shape[1], num_rows = q_shape[1], scoring = q_shape[2], capacity = k_shape[1];
const int b = threadgroup_position_in_grid.y / head_groups, g = threadgroup_position_in_grid.y % head_groups;
const int split = threadgroup_position_in_grid.x, splits = threadgroups_per_grid.x;
const int all_rows = num_rows * width, strips = (all_rows + 7) / 8;
const int block = (strips + int(threadgroups_per_grid.z) - 1) / int(threadgroups_per_grid.z);
const int strip = int(threadgroup_position_in_grid.z) * block + group;
const bool computes = group < block && strip < strips;
const int r = strip * 8 + fragment_row(lane), column = fragment_column(lane);
int slot = -1;
if (computes && r < all_rows) slot = slots[g * width + r % width];
const int query = r / width * scoring + slot;
AllTokens tokens;
tokens.committed = item(lengths, b);
const int total = tokens.committed, tiles = (total + BK - 1) / BK, share = (tiles + splits - 1) / splits;
const int last = min(tiles, (split + 1) * share);
const device T* keys = k + b * k_strides[0] + item(kv_heads, g) * k_strides[2];
Fragment queries[D / 8], scores[BK / 8];
load_queries<T, D>(q + (long(b) * num_rows * scoring + query) * D, slot >= 0, scale * 1.44269504f, queries, lane);
float top = LOWEST, sum = 0.0f;
for (int tile = split * share; tile < last; ++tile) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_tile<T, D, BK, false>(keys, keys, k_strides[1], 0, tokens, tile * BK, total, k_tile, k_tile, lane, group, groups);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!computes) continue;
  query_key<T, D, BK>(queries, k_tile, scores, lane);
  float best = top;
  for (int j = 0; j < BK / 8; ++j)
    for (int e = 0; e < 2; ++e) {
      const int key = tile * BK + j * 8 + column + e;
      if (key >= total) scores[j].thread_elements()[e] = LOWEST;
      else if (slot >= 0) logits[(long(b) * num_rows * scoring + query) * capacity + key] = scores[j].thread_elements()[e];
      best = max(best, float(scores[j].thread_elements()[e]));
    }
  best = max(best, simd_shuffle_xor(best, ushort(1)));
  best = max(best, simd_shuffle_xor(best, ushort(8)));
  float part = 0.0f;
  for (int j = 0; j < BK / 8; ++j)
    for (int e = 0; e < 2; ++e)
      part += scores[j].thread_elements()[e] > 0.5f * LOWEST ? exp2(scores[j].thread_elements()[e] - best) : 0.0f;
  part += simd_shuffle_xor(part, ushort(1));
  part += simd_shuffle_xor(part, ushort(8));
  sum = sum * exp2(top - best) + part;
  top = best;
}
if (slot >= 0 && column == 0) {
  const long at = ((long(b) * num_rows * scoring + query) * splits + split) * 2;
  stats[at] = top;
  stats[at + 1] = sum;
}
