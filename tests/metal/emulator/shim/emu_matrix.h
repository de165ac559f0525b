// simdgroup_matrix 8x8 with the lane map that MLX relies on: lane -> row fm, columns fn and fn + 1.
#pragma once
#include "emu_simd.h"

namespace metal {
EMU_PLAIN EMU_INLINE int emu_matrix_row(int lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
EMU_PLAIN EMU_INLINE int emu_matrix_column(int lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8x8");
  static_assert(std::is_same<T, float>::value || std::is_same<T, half>::value || std::is_same<T, bfloat>::value, "float types only");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  EMU_INLINE explicit simdgroup_matrix(T v) {  // diagonal, as in Metal: only make_filled_simdgroup_matrix fills
    int row = emu_matrix_row(emu_self()->lane), column = emu_matrix_column(emu_self()->lane);
    for (int i = 0; i < 2; ++i) elements[i] = column + i == row ? v : T(0);
  }
  typedef vec<T, 2> storage_type;
  EMU_INLINE vec<T, 2>& thread_elements() { return elements; }
  EMU_INLINE const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C> EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(v);
  return m;
}

template <class T> EMU_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, ulong stride = 8, ulong2 origin = ulong2(0),
                                                  bool transpose = false, int line = __builtin_LINE()) {
  int lane = emu_self()->lane, r = emu_matrix_row(lane), c = emu_matrix_column(lane);
  emu_meet(&lane, 4, "simdgroup_load", line, nullptr);
  for (int i = 0; i < 2; ++i)
    m.elements[i] = transpose ? p[(origin.y + c + i) * stride + origin.x + r] : p[(origin.y + r) * stride + origin.x + c + i];
}
template <class T> EMU_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* p, ulong stride = 8, ulong2 origin = ulong2(0),
                                                   bool transpose = false, int line = __builtin_LINE()) {
  int lane = emu_self()->lane, r = emu_matrix_row(lane), c = emu_matrix_column(lane);
  emu_meet(&lane, 4, "simdgroup_store", line, nullptr);
  for (int i = 0; i < 2; ++i)
    (transpose ? p[(origin.y + c + i) * stride + origin.x + r] : p[(origin.y + r) * stride + origin.x + c + i]) = m.elements[i];
}

struct EmuFragment { float a[2], b[2], c[2]; };
EMU_PLAIN inline void emu_multiply(char* s, uint32_t lanes) {
  float a[8][8] = {}, bt[8][8] = {}, c[8][8] = {};
  for (uint32_t l = 0; l < lanes; ++l) {
    EmuFragment& f = emu_slot<EmuFragment>(s, l);
    int r = emu_matrix_row(l), k = emu_matrix_column(l);
    for (int i = 0; i < 2; ++i) { a[r][k + i] = f.a[i]; bt[k + i][r] = f.b[i]; c[r][k + i] = f.c[i]; }
  }
  for (int r = 0; r < 8; ++r)
    for (int k = 0; k < 8; ++k) {
      float sum = c[r][k];
      for (int i = 0; i < 8; ++i) sum += a[r][i] * bt[k][i];
      c[r][k] = sum;
    }
  for (uint32_t l = 0; l < lanes; ++l) {
    int r = emu_matrix_row(l), k = emu_matrix_column(l);
    for (int i = 0; i < 2; ++i) emu_slot<EmuFragment>(s, l).c[i] = c[r][k + i];
  }
}
template <class TD, class TA, class TB, class TC>
EMU_PLAIN EMU_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<TD, 8, 8>& d, simdgroup_matrix<TA, 8, 8> a, simdgroup_matrix<TB, 8, 8> b,
                                              simdgroup_matrix<TC, 8, 8> c, int line = __builtin_LINE()) {
  static_assert(std::is_same<TD, TC>::value && std::is_same<TA, TB>::value, "operands A and B, and C and D, share a type");
  EmuFragment f = {{float(a.elements.x), float(a.elements.y)}, {float(b.elements.x), float(b.elements.y)},
                   {float(c.elements.x), float(c.elements.y)}};
  f = emu_exchange(f, "simdgroup_multiply_accumulate", line, emu_multiply);
  d.elements.x = TD(f.c[0]);
  d.elements.y = TD(f.c[1]);
}
template <class TD, class TA, class TB>
EMU_INLINE void simdgroup_multiply(simdgroup_matrix<TD, 8, 8>& d, simdgroup_matrix<TA, 8, 8> a, simdgroup_matrix<TB, 8, 8> b, int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<TD, 8, 8>(TD(0)), line);
}
}  // namespace metal
