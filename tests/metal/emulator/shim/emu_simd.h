// SIMD-group functions: all lanes of the group must meet at the same source line, else the runtime reports divergence.
#pragma once
#include "emu_math.h"

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
EMU_INLINE void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) { emu_barrier(0, int(f), line); }
EMU_INLINE void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) { emu_barrier(1, int(f), line); }

template <class T> EMU_PLAIN EMU_INLINE T& emu_slot(char* slots, int lane) { return *reinterpret_cast<T*>(slots + lane * EMU_SLOT); }

struct OpSum { template <class T> static T f(T a, T b) { return a + b; } };
struct OpMul { template <class T> static T f(T a, T b) { return a * b; } };
struct OpMax { template <class T> static T f(T a, T b) { return a < b ? b : a; } };
struct OpMin { template <class T> static T f(T a, T b) { return b < a ? b : a; } };
struct OpOr { template <class T> static T f(T a, T b) { return a | b; } };
struct OpAnd { template <class T> static T f(T a, T b) { return a & b; } };
struct OpXor { template <class T> static T f(T a, T b) { return a ^ b; } };

template <class T, class Op> EMU_PLAIN void emu_reduce(char* s, uint32_t lanes) {  // a tree, as hardware does it
  T v[32];
  for (uint32_t i = 0; i < lanes; ++i) v[i] = emu_slot<T>(s, i);
  for (uint32_t step = 1; step < lanes; step *= 2)
    for (uint32_t i = 0; i + step < lanes; i += 2 * step) v[i] = Op::f(v[i], v[i + step]);
  for (uint32_t i = 0; i < lanes; ++i) emu_slot<T>(s, i) = v[0];
}
template <class T, class Op, bool inclusive> EMU_PLAIN void emu_scan(char* s, uint32_t lanes) {
  T run = std::is_same<Op, OpMul>::value ? T(1) : T(0);
  for (uint32_t i = 0; i < lanes; ++i) {
    T v = emu_slot<T>(s, i), next = Op::f(run, v);
    emu_slot<T>(s, i) = inclusive ? next : run;
    run = next;
  }
}
template <class T> EMU_PLAIN EMU_INLINE T emu_exchange(T v, const char* op, int line, EmuCombine c) {
  return emu_slot<T>(emu_meet(&v, sizeof(T), op, line, c), emu_self()->lane);
}
#define EMU_REDUCE(name, Op)                                                                                \
  template <class T> EMU_INLINE T simd_##name(T v, int line = __builtin_LINE()) {                           \
    return emu_exchange<T>(v, "simd_" #name, line, emu_reduce<T, Op>); }
EMU_REDUCE(sum, OpSum) EMU_REDUCE(product, OpMul) EMU_REDUCE(max, OpMax) EMU_REDUCE(min, OpMin)
EMU_REDUCE(or, OpOr) EMU_REDUCE(and, OpAnd) EMU_REDUCE(xor, OpXor)
#undef EMU_REDUCE
#define EMU_SCAN(name, Op, inc)                                                                             \
  template <class T> EMU_INLINE T simd_prefix_##name(T v, int line = __builtin_LINE()) {                    \
    return emu_exchange<T>(v, "simd_prefix_" #name, line, emu_scan<T, Op, inc>); }
EMU_SCAN(inclusive_sum, OpSum, true) EMU_SCAN(exclusive_sum, OpSum, false)
EMU_SCAN(inclusive_product, OpMul, true) EMU_SCAN(exclusive_product, OpMul, false)
#undef EMU_SCAN

// A source lane outside the group is undefined in Metal: poison it, so that using the value shows.
template <class T> EMU_PLAIN EMU_INLINE T emu_from(T v, int source, const char* op, int line) {
  char* s = emu_meet(&v, sizeof(T), op, line, nullptr);
  if (source < 0 || source >= int(emu_self()->lanes)) { T poison; __builtin_memset(&poison, 0xff, sizeof(T)); return poison; }
  return emu_slot<T>(s, source);
}
template <class T> EMU_INLINE T simd_shuffle(T v, int l, int line = __builtin_LINE()) { return emu_from(v, l, "simd_shuffle", line); }
template <class T> EMU_INLINE T simd_shuffle_xor(T v, int m, int line = __builtin_LINE()) {
  return emu_from(v, int(emu_self()->lane) ^ m, "simd_shuffle_xor", line); }
template <class T> EMU_INLINE T simd_shuffle_down(T v, int d, int line = __builtin_LINE()) {
  return emu_from(v, int(emu_self()->lane) + d, "simd_shuffle_down", line); }
template <class T> EMU_INLINE T simd_shuffle_up(T v, int d, int line = __builtin_LINE()) {
  return emu_from(v, int(emu_self()->lane) - d, "simd_shuffle_up", line); }
template <class T> EMU_INLINE T simd_broadcast(T v, int l, int line = __builtin_LINE()) { return emu_from(v, l, "simd_broadcast", line); }
template <class T> EMU_INLINE T simd_broadcast_first(T v, int line = __builtin_LINE()) { return emu_from(v, 0, "simd_broadcast_first", line); }

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit simd_vote(vote_t b = 0) : bits(b) {}
  explicit operator vote_t() const { return bits; }
};
EMU_PLAIN inline void emu_ballot(char* s, uint32_t lanes) {
  ulong bits = 0;
  for (uint32_t i = 0; i < lanes; ++i) bits |= ulong(emu_slot<ulong>(s, i) != 0) << i;
  for (uint32_t i = 0; i < lanes; ++i) emu_slot<ulong>(s, i) = bits;
}
EMU_INLINE simd_vote simd_ballot(bool p, int line = __builtin_LINE()) {
  return simd_vote(emu_exchange<ulong>(p, "simd_ballot", line, emu_ballot)); }
EMU_INLINE bool simd_any(bool p, int line = __builtin_LINE()) { return emu_exchange<uint>(p, "simd_any", line, emu_reduce<uint, OpOr>) != 0; }
EMU_INLINE bool simd_all(bool p, int line = __builtin_LINE()) { return emu_exchange<uint>(p, "simd_all", line, emu_reduce<uint, OpAnd>) != 0; }
EMU_INLINE bool simd_is_first() { return emu_self()->lane == 0; }
}  // namespace metal
