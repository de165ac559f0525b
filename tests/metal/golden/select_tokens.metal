// grid (512, 2, 1) threadgroup (512, 1, 1)
// Helpers of select_tokens: a radix search for the k-th best score among unmarked tokens, all threads of one threadgroup.
// Each SIMD-group owns a run of 32-token words: a lane a token, so ranks in index order are prefix sums.
#include <metal_atomic>
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

inline int item(int x, int) { return x; }
template <typename P>
inline int item(P x, int i) { return x[i]; }

// Unsigned order of floats; both zeros are one value, NaN is the lowest.
inline uint order_key(float x) {
  uint u = as_type<uint>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0u;
  if ((u & 0x7fffffffu) == 0u) u = 0u;
  return (u & 0x80000000u) ? ~u : (u | 0x80000000u);
}

struct Share {  // of this SIMD-group
  int first_word, last_word, tokens;
  ushort lane, group, groups;
};

// Adds the `take` best unmarked tokens of scores [N] to `marks`; among equals the lower index wins.
template <typename P>
inline void mark_best(P scores, int take, device uint* marks, threadgroup atomic_uint* bins, threadgroup uint* found,
                      threadgroup uint* equals, Share s) {
  uint prefix = 0u, mask = 0u;
  int left = take;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = s.group * 32 + s.lane; i < 256; i += s.groups * 32) atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int w = s.first_word; w < s.last_word; ++w) {
      const int j = w * 32 + s.lane;
      if (j >= s.tokens || ((marks[w] >> s.lane) & 1u)) continue;
      const uint key = order_key(scores[j]);
      if ((key & mask) == prefix) atomic_fetch_add_explicit(&bins[(key >> shift) & 255u], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (s.group == 0) {  // lane i holds the 8 bins below 256 - 8 i
      uint here = 0u;
      for (int i = 0; i < 8; ++i) here += atomic_load_explicit(&bins[255 - s.lane * 8 - i], memory_order_relaxed);
      uint above = simd_prefix_exclusive_sum(here);
      if (int(above) < left && int(above + here) >= left) {
        for (int i = 0; i < 8; ++i) {
          const uint one = atomic_load_explicit(&bins[255 - s.lane * 8 - i], memory_order_relaxed);
          if (int(above + one) >= left) {
            found[0] = uint(255 - s.lane * 8 - i);
            found[1] = above;
            break;
          }
          above += one;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefix |= found[0] << shift;
    mask |= 255u << shift;
    left -= int(found[1]);
  }
  uint same = 0u;
  for (int w = s.first_word; w < s.last_word; ++w) {
    const int j = w * 32 + s.lane;
    if (j < s.tokens && !((marks[w] >> s.lane) & 1u) && order_key(scores[j]) == prefix) same += 1u;
  }
  same = simd_sum(same);
  if (s.lane == 0) equals[s.group] = same;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int rank = 0;
  for (int i = 0; i < s.group; ++i) rank += int(equals[i]);
  for (int w = s.first_word; w < s.last_word; ++w) {
    const int j = w * 32 + s.lane;
    const uint old = marks[w];
    const bool open = j < s.tokens && !((old >> s.lane) & 1u);
    uint key = 0u;
    if (open) key = order_key(scores[j]);
    const uint equal = open && key == prefix ? 1u : 0u;
    const int mine = rank + int(simd_prefix_exclusive_sum(equal));
    const bool chosen = open && (key > prefix || (equal == 1u && mine < left));
    const uint bits = simd_or(chosen ? 1u << s.lane : 0u);
    simdgroup_barrier(mem_flags::mem_device);  // every lane has read the word
    if (s.lane == 0) marks[w] = old | bits;
    rank += int(simd_sum(equal));
  }
  threadgroup_barrier(mem_flags::mem_device);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
[[kernel]] void custom_kernel_dustin_select_tokens_b9cd08dff866_float_float_int32_tc_int32_tc_int32_t_int32_t_uint32_t(
  const device float* target [[buffer(0)]],
  const constant int* target_shape [[buffer(1)]],
  const device float* draft [[buffer(2)]],
  const constant int32_t* lengths [[buffer(3)]],
  const constant int32_t* params [[buffer(4)]],
  device int32_t* indices [[buffer(5)]],
  device int32_t* counts [[buffer(6)]],
  device uint32_t* marks [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
  uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
// The quota rule for one sequence a threadgroup: protect sinks and recent, then `num_draft` by draft, then fill by target.
// params = {sinks, recent, num_draft, budget}; `indices` is [B, budget].
// may stay unwritten: marks
threadgroup atomic_uint bins[256];
threadgroup uint found[2], equals[32];
const int b = threadgroup_position_in_grid.y, capacity = target_shape[1], tokens = item(lengths, b);
const int sinks = params[0], recent = params[1], num_draft = params[2], budget = params[3];
const int thread_index = thread_position_in_threadgroup.x, num_threads = threads_per_threadgroup.x;
device int* chosen = indices + long(b) * budget;
if (tokens <= budget) {
  for (int i = thread_index; i < budget; i += num_threads) chosen[i] = i < tokens ? i : 0;
  if (thread_index == 0) counts[b] = tokens;
  return;
}
const int words = (tokens + 31) / 32, share = (words + int(simdgroups_per_threadgroup) - 1) / int(simdgroups_per_threadgroup);
Share s;
s.lane = thread_index_in_simdgroup;
s.group = simdgroup_index_in_threadgroup;
s.groups = simdgroups_per_threadgroup;
s.tokens = tokens;
s.first_word = min(words, int(s.group) * share);
s.last_word = min(words, s.first_word + share);
device uint* bits = marks + long(b) * ((capacity + 31) / 32);
for (int w = s.first_word; w < s.last_word; ++w) {
  const int j = w * 32 + s.lane;
  const uint word = simd_or(j < tokens && (j < sinks || j >= tokens - recent) ? 1u << s.lane : 0u);
  if (s.lane == 0) bits[w] = word;
}
threadgroup_barrier(mem_flags::mem_device);
if (num_draft > 0) mark_best(draft + long(b) * capacity, num_draft, bits, bins, found, equals, s);
const int fill = budget - sinks - recent - num_draft;
if (fill > 0) mark_best(target + long(b) * capacity, fill, bits, bins, found, equals, s);
uint held = 0u;
for (int w = s.first_word + s.lane; w < s.last_word; w += 32) held += popcount(bits[w]);
held = simd_sum(held);
if (s.lane == 0) equals[s.group] = held;
threadgroup_barrier(mem_flags::mem_threadgroup);
int next = 0;
for (int i = 0; i < s.group; ++i) next += int(equals[i]);
for (int w = s.first_word; w < s.last_word; ++w) {
  const uint word = bits[w];
  if ((word >> s.lane) & 1u) chosen[next + int(popcount(word & ((1u << s.lane) - 1u)))] = w * 32 + s.lane;
  next += int(popcount(word));
}
if (thread_index == 0) counts[b] = budget;

}
