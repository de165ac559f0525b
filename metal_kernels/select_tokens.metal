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
