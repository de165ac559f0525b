// Merge the key splits of a query row: one SIMD-group a row, threadgroups (1, Hq, B * T). A split whose sum is 0 is not read.
const int kv_heads = partial_shape[1], splits = partial_shape[2], rows = partial_shape[3];
const int heads = threadgroups_per_grid.y, group_size = heads / kv_heads, num_rows = rows / group_size;
const int head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const int b = row / num_rows, step = row % num_rows, lane = thread_index_in_simdgroup;
const long first = long(b * kv_heads + head / group_size) * splits * rows + step * group_size + head % group_size;
float top = LOWEST;
for (int s = lane; s < splits; s += 32) top = max(top, float(stats[(first + long(s) * rows) * 2]));
top = simd_max(top);
float sum = 0.0f, out_sum[D / 32];
for (int i = 0; i < D / 32; ++i) out_sum[i] = 0.0f;
for (int s = 0; s < splits; ++s) {
  const long at = first + long(s) * rows;
  const float part = stats[at * 2 + 1];
  if (part == 0.0f) continue;
  const float weight = exp2(stats[at * 2] - top);
  sum += part * weight;
  for (int i = 0; i < D / 32; ++i) out_sum[i] += weight * partial[at * D + lane + 32 * i];
}
const float norm = sum > 0.0f ? 1.0f / sum : 0.0f;  // rows beyond num_tokens have no mass: they give 0
for (int i = 0; i < D / 32; ++i) out[(long(row) * heads + head) * D + lane + 32 * i] = T(out_sum[i] * norm);
