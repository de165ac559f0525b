// What the generated kernel and the runtime share. Kernel code is instrumented; the runtime is not.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define EMU_PLAIN
#define EMU_INLINE __device__ __forceinline__
#else
#define EMU_PLAIN __attribute__((no_sanitize("thread")))
#define EMU_INLINE inline __attribute__((always_inline))
#endif

extern "C" {
// Attributes of the running thread, filled by the runtime before the fiber starts.
struct EmuThread {
  uint32_t position_in_grid[3], position_in_group[3], group_position[3];
  uint32_t threads_per_grid[3], groups_per_grid[3], threads_per_group[3], dispatch_threads_per_group[3];
  uint32_t index, lane, simdgroup, simdgroups, lanes;
};
typedef void (*EmuCombine)(char* slots, uint32_t lanes);  // runs once, on the last lane that arrives
enum { EMU_SLOT = 64 };                                   // bytes a lane may exchange at one meeting

EmuThread* emu_self();
// Threadgroup array of definition `id`; the same address for every thread of a group.
void* emu_threadgroup(int id, size_t bytes, size_t align, int line);
// kind 0 threadgroup_barrier, 1 simdgroup_barrier; flags as metal::mem_flags.
void emu_barrier(int kind, int flags, int line);
// Deposit `bytes` for this lane, wait for the whole SIMD-group at the same (op, line), return all slots.
char* emu_meet(const void* value, size_t bytes, const char* op, int line, EmuCombine combine);
// Relaxed 32-bit atomics: op 0 load, 1 store, 2 exchange, 3 add, 4 sub, 5 min, 6 max, 7 or, 8 and, 9 xor, 10 float add.
uint32_t emu_atomic(void* address, int op, uint32_t value, int is_signed, void* pc);
}

struct EmuPointer {
  void* p;
  template <class U> EMU_INLINE operator U*() const { return static_cast<U*>(p); }
};
