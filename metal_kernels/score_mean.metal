// scores[b, j] = mean over queries of softmax_j, from logits [B, Q, Nmax] and split statistics [B, Q, splits, 2]; -inf at and
// beyond lengths[b]. Threadgroup x covers KEYS keys of sequence y.
threadgroup float tops[MAX_QUERIES], norms[MAX_QUERIES];
const int queries = logits_shape[1], capacity = logits_shape[2], splits = stats_shape[2], b = threadgroup_position_in_grid.y;
const int length = item(lengths, b), lane = thread_index_in_simdgroup, first = threadgroup_position_in_grid.x * KEYS;
if (first < length) {
  for (int i = simdgroup_index_in_threadgroup; i < queries; i += simdgroups_per_threadgroup) {
    const long at = (long(b) * queries + i) * splits;
    float top = LOWEST, sum = 0.0f;
    for (int s = lane; s < splits; s += 32) top = max(top, float(stats[(at + s) * 2]));
    top = simd_max(top);
    for (int s = lane; s < splits; s += 32) sum += stats[(at + s) * 2 + 1] * exp2(stats[(at + s) * 2] - top);
    sum = simd_sum(sum);
    if (lane == 0) {
      tops[i] = top;
      norms[i] = 1.0f / (sum * float(queries));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (int j = first + int(thread_position_in_threadgroup.x); j < min(first + KEYS, capacity); j += int(threads_per_threadgroup.x)) {
  float score = -INFINITY;
  if (j < length) {
    score = 0.0f;
    for (int i = 0; i < queries; ++i) score += exp2(logits[(long(b) * queries + i) * capacity + j] - tops[i]) * norms[i];
  }
  scores[long(b) * capacity + j] = score;
}
