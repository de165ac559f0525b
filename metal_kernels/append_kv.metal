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
