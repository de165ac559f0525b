// Scalars and vectors of the Metal shading language, strict: narrowing to half or bfloat must be spelled out,
// and every half or bfloat operation rounds to its own type.
#pragma once
#include <type_traits>
#include "emu_abi.h"

namespace metal {
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::size_t; using ::ptrdiff_t;
using std::enable_if_t; using std::is_same_v; using std::is_same; using std::conditional_t;

template <class To, class From> EMU_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  return __builtin_bit_cast(To, from);
}

#ifdef __CUDACC__
struct HalfCode {
  EMU_INLINE static uint16_t encode(float f) { return __half_as_ushort(__float2half_rn(f)); }
  EMU_INLINE static float decode(uint16_t h) { return __half2float(__ushort_as_half(h)); }
};
#else
typedef float Floats __attribute__((vector_size(16)));
typedef short Shorts __attribute__((vector_size(16)));
struct HalfCode {
  EMU_PLAIN static uint16_t encode(float f) {
#ifdef __F16C__
    Floats v = {f, 0, 0, 0};
    return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(v, 0)[0]);
#else
    uint32_t x = as_type<uint32_t>(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
    if (a >= 0x7f800000u) return sign | (a > 0x7f800000u ? 0x7e00u : 0x7c00u);
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a < 0x38800000u) {  // subnormal: add a magic number so the hardware rounds for us
      float r = as_type<float>(a) + 0.5f;
      return sign | static_cast<uint16_t>(as_type<uint32_t>(r) - 0x3f000000u);
    }
    a += 0xc8000fffu + ((a >> 13) & 1u);
    return sign | static_cast<uint16_t>(a >> 13);
#endif
  }
  EMU_PLAIN static float decode(uint16_t h) {
#ifdef __F16C__
    Shorts v = {static_cast<short>(h), 0, 0, 0, 0, 0, 0, 0};
    return __builtin_ia32_vcvtph2ps(v)[0];
#else
    uint32_t sign = uint32_t(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 1023u;
    if (e == 31) return as_type<float>(sign | 0x7f800000u | (m << 13));
    if (e == 0) { float v = float(m) * 0x1p-24f; return sign ? -v : v; }
    return as_type<float>(sign | ((e + 112u) << 23) | (m << 13));
#endif
  }
};
#endif
struct BfloatCode {
  EMU_PLAIN EMU_INLINE static uint16_t encode(float f) {
    uint32_t x = as_type<uint32_t>(f);
    if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }
  EMU_PLAIN EMU_INLINE static float decode(uint16_t b) { return as_type<float>(uint32_t(b) << 16); }
};

template <class Code> struct Small {  // a 16-bit float
  uint16_t bits;
  Small() = default;
  template <class A, class = std::enable_if_t<std::is_arithmetic<A>::value>>
  EMU_INLINE explicit Small(A a) : bits(Code::encode(static_cast<float>(a))) {}
  template <class C, class = std::enable_if_t<!std::is_same<C, Code>::value>>
  EMU_INLINE explicit Small(Small<C> o) : bits(Code::encode(static_cast<float>(o))) {}
  EMU_INLINE operator float() const { return Code::decode(bits); }
  EMU_INLINE Small& operator+=(Small o) { return *this = *this + o; }
  EMU_INLINE Small& operator-=(Small o) { return *this = *this - o; }
  EMU_INLINE Small& operator*=(Small o) { return *this = *this * o; }
  EMU_INLINE Small& operator/=(Small o) { return *this = *this / o; }
  friend EMU_INLINE Small operator+(Small a, Small b) { return Small(float(a) + float(b)); }
  friend EMU_INLINE Small operator-(Small a, Small b) { return Small(float(a) - float(b)); }
  friend EMU_INLINE Small operator*(Small a, Small b) { return Small(float(a) * float(b)); }
  friend EMU_INLINE Small operator/(Small a, Small b) { return Small(float(a) / float(b)); }
  friend EMU_INLINE Small operator-(Small a) { return Small(-float(a)); }
};
typedef Small<HalfCode> half;
typedef Small<BfloatCode> bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef float float32_t;

template <class T, int N> struct VecStore;
template <class T> struct alignas(2 * sizeof(T)) VecStore<T, 2> { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) VecStore<T, 3> { T x, y, z; };
template <class T> struct alignas(4 * sizeof(T)) VecStore<T, 4> { T x, y, z, w; };

template <class T, int N> struct vec : VecStore<T, N> {
  vec() = default;
  template <class A, class = std::enable_if_t<std::is_convertible<A, float>::value || std::is_arithmetic<A>::value>>
  EMU_INLINE vec(A a) { for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(a); }
  template <class U> EMU_INLINE explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(o[i]); }
  EMU_INLINE vec(T a, T b) { static_assert(N == 2, "two components"); (*this)[0] = a; (*this)[1] = b; }
  EMU_INLINE vec(T a, T b, T c) { static_assert(N == 3, "three components"); (*this)[0] = a; (*this)[1] = b; (*this)[2] = c; }
  EMU_INLINE vec(T a, T b, T c, T d) {
    static_assert(N == 4, "four components");
    (*this)[0] = a; (*this)[1] = b; (*this)[2] = c; (*this)[3] = d;
  }
  EMU_INLINE T& operator[](int i) { return (&this->x)[i]; }
  EMU_INLINE const T& operator[](int i) const { return (&this->x)[i]; }
};
#define EMU_VEC_OP(op)                                                                                     \
  template <class T, int N> EMU_INLINE vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {                    \
    vec<T, N> r; for (int i = 0; i < N; ++i) r[i] = a[i] op b[i]; return r; }                               \
  template <class T, int N, class S> EMU_INLINE vec<T, N> operator op(vec<T, N> a, S b) { return a op vec<T, N>(b); } \
  template <class T, int N> EMU_INLINE vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) { return a = a op b; }
EMU_VEC_OP(+) EMU_VEC_OP(-) EMU_VEC_OP(*) EMU_VEC_OP(/)
#undef EMU_VEC_OP
template <class T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0]; for (int i = 1; i < N; ++i) r = r + a[i] * b[i]; return r; }

#define EMU_ALIASES(T) typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;
EMU_ALIASES(float) EMU_ALIASES(half) EMU_ALIASES(bfloat) EMU_ALIASES(int) EMU_ALIASES(uint)
EMU_ALIASES(short) EMU_ALIASES(ushort) EMU_ALIASES(char) EMU_ALIASES(uchar) EMU_ALIASES(long) EMU_ALIASES(ulong)
#undef EMU_ALIASES

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float max() { return 3.402823466e38f; }
  static constexpr float lowest() { return -3.402823466e38f; }
  static constexpr float infinity() { return __builtin_inff(); }
};
template <> struct numeric_limits<int> { static constexpr int max() { return 0x7fffffff; } };
template <> struct numeric_limits<uint> { static constexpr uint max() { return 0xffffffffu; } };
}  // namespace metal
// Metal writes metal::numeric_limits<T>::min() for the lowest finite value through MLX's Limits class.
