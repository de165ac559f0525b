// State of the machine and the fiber switch.
#pragma once
#include <link.h>
#include <sys/mman.h>
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>
#include "shim/emu_abi.h"

namespace {
constexpr uintptr_t SPAN = 1ull << 36, GAP = 1ull << 26, PAGE = 4096, STACK = 1 << 17;
constexpr size_t RED_ZONE = 1024, MAX_ARRAYS = 24;  // between threadgroup arrays, so that an overrun shows
constexpr uint16_t MANY = 0xffff;
constexpr uint32_t NONE = 0xffffffffu;

struct Cell {  // who wrote and who read a granule last, by group, barrier epochs and thread
  uint32_t wgroup = NONE, wepoch, wsimd_epoch, rgroup = NONE, repoch, rsimd_epoch;
  uint16_t wthread, rthread, wsg, rsg;
  bool written = false;
};
struct Region {
  char name[64];
  uintptr_t start;
  size_t size;
  int shift;       // granule of the shadow, log2 bytes
  bool writable, threadgroup;
  uint64_t loaded, stored;
  std::vector<uint8_t> touched;
  std::vector<Cell> cells;
};
enum State { READY, MEET, BARRIER, SIMD_BARRIER, DONE };
struct Fiber {
  EmuThread self;
  void* sp;
  State state;
  const char* op;
  int line;
};
struct Simdgroup {
  char slots[2][32][EMU_SLOT];
  uint32_t lanes, arrived, parity, epoch[2];
  int first;
};
struct Error { char kind[24]; char text[232]; uintptr_t pc; };

std::vector<Region> regions;
std::vector<Fiber> fibers;
std::vector<Simdgroup> simdgroups;
std::vector<Error> errors;
std::vector<std::pair<uintptr_t, uintptr_t>> modules;
char *base = nullptr, *stacks = nullptr;
size_t stack_count = 0, used_threadgroup = 0, max_threadgroup = 0, threadgroup_limit = 0, arena_used = 0, arena_dirty = 0;
struct Definition { int id; size_t offset, bytes; };
std::vector<Definition> definitions;
uint32_t group_id, epoch[2], barrier_arrived, live;
uint64_t steps, step_limit;
bool checking, aborted;
Fiber* current;
void* main_sp;
void** entry_buffers;
void (*entry)(void**, EmuThread*);

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* to);
asm(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
void fiber_main();
void* fiber_new(char* stack) {
  void** sp = reinterpret_cast<void**>(stack + STACK) - 3;  // rsp is 8 beyond a multiple of 16 at entry, as after a call
  *--sp = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
extern "C" void emu_switch(void** save, void* to);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "sub sp,sp,#176\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\n"
    "stp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\n"
    "ldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\n"
    "ldp d14,d15,[sp,#144]\nadd sp,sp,#176\nret\n");
void fiber_main();
void* fiber_new(char* stack) {
  char* sp = stack + STACK - 176;
  std::memset(sp, 0, 176);
  reinterpret_cast<void**>(sp)[11] = reinterpret_cast<void*>(fiber_main);  // x30
  return sp;
}
#else
#error "the emulator switches fibers on x86-64 and arm64 only"
#endif

}  // namespace
