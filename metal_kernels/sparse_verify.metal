// T in-flight rows over the selected rows and themselves: a token gather, staged, shared by all g * T rows of a head.
// may stay unwritten: partial
threadgroup T k_tile[BK * (D + PAD)];
threadgroup T v_tile[BK * (D + PAD)];
const Place place = find_place(threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, q_shape[1],
                               q_shape[2], k_shape[2]);
const int valid = min(item(num_tokens, place.b), q_shape[1]);
const int count = min(item(counts, place.b), indices_shape[1]);
attend<T, D, BK, DIRECT>(q, k + place.b * k_strides[0] + place.head * k_strides[2],
                         v + place.b * v_strides[0] + place.head * v_strides[2], k_strides[1], v_strides[1],
                         selected_tokens(indices + place.b * indices_shape[1], count, item(lengths, place.b)), valid, scale, place,
                         k_tile, v_tile, OUTPUTS, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
                         simdgroups_per_threadgroup);
