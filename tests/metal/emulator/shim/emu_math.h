// Math functions and relaxed atomics. Precise arithmetic: fast-math is what this tool cannot show.
#pragma once
#include "emu_types.h"

namespace metal {
#define EMU_FLOAT_FN(name, builtin)                                                                         \
  EMU_INLINE float name(float x) { return builtin(x); }                                                     \
  template <class C> EMU_INLINE Small<C> name(Small<C> x) { return Small<C>(builtin(float(x))); }
EMU_FLOAT_FN(exp, __builtin_expf) EMU_FLOAT_FN(exp2, __builtin_exp2f) EMU_FLOAT_FN(log, __builtin_logf)
EMU_FLOAT_FN(log2, __builtin_log2f) EMU_FLOAT_FN(sqrt, __builtin_sqrtf) EMU_FLOAT_FN(tanh, __builtin_tanhf)
EMU_FLOAT_FN(floor, __builtin_floorf) EMU_FLOAT_FN(ceil, __builtin_ceilf) EMU_FLOAT_FN(sin, __builtin_sinf)
EMU_FLOAT_FN(cos, __builtin_cosf) EMU_FLOAT_FN(fabs, __builtin_fabsf)
#undef EMU_FLOAT_FN
EMU_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
EMU_INLINE float pow(float a, float b) { return __builtin_powf(a, b); }
EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE bool isnan(float x) { return __builtin_isnan(x); }
EMU_INLINE bool isinf(float x) { return __builtin_isinf(x); }
EMU_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
template <class T> EMU_INLINE T abs(T x) { return x < T(0) ? -x : x; }
template <class T> EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
template <class T> EMU_INLINE T min(T a, T b) { return b < a ? b : a; }
template <class T> EMU_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> EMU_INLINE T select(T a, T b, bool c) { return c ? b : a; }
EMU_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
EMU_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
EMU_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
namespace fast { using metal::exp; using metal::exp2; using metal::log; using metal::log2; using metal::tanh; }
namespace precise { using metal::exp; using metal::exp2; using metal::log; using metal::log2; using metal::tanh; }

enum memory_order { memory_order_relaxed };
template <class T> struct Atomic { T value; };
typedef Atomic<uint> atomic_uint;
typedef Atomic<int> atomic_int;
typedef Atomic<float> atomic_float;
template <class T> using atomic = Atomic<T>;
template <class T> EMU_INLINE T emu_atomic_op(Atomic<T>* p, int op, T v) {
  return as_type<T>(emu_atomic(p, op, as_type<uint32_t>(v), std::is_signed<T>::value, nullptr));
}
#define EMU_ATOMIC(name, op)                                                                                \
  template <class T, class V> EMU_INLINE T atomic_##name##_explicit(Atomic<T>* p, V v, memory_order) {      \
    return emu_atomic_op<T>(p, std::is_same<T, float>::value && op == 3 ? 10 : op, T(v)); }
EMU_ATOMIC(exchange, 2) EMU_ATOMIC(fetch_add, 3) EMU_ATOMIC(fetch_sub, 4) EMU_ATOMIC(fetch_min, 5)
EMU_ATOMIC(fetch_max, 6) EMU_ATOMIC(fetch_or, 7) EMU_ATOMIC(fetch_and, 8) EMU_ATOMIC(fetch_xor, 9)
#undef EMU_ATOMIC
template <class T> EMU_INLINE T atomic_load_explicit(const Atomic<T>* p, memory_order) {
  return emu_atomic_op<T>(const_cast<Atomic<T>*>(p), 0, T()); }
template <class T, class V> EMU_INLINE void atomic_store_explicit(Atomic<T>* p, V v, memory_order) { emu_atomic_op<T>(p, 1, T(v)); }
}  // namespace metal
