// The machine: one fiber a thread, SIMD meetings, barriers, and a checker fed by the compiler's thread-sanitizer hooks.
// Memory that kernels may touch lies in one reserved range; an address outside it, the fiber stacks and the module's own
// data is wild. Threadgroup arrays and outputs carry shadow cells; inputs only bounds and byte counts.
#include "checker.h"

namespace {
void fiber_main() {
  entry(entry_buffers, &current->self);
  current->state = DONE;
  --live;
  for (;;) leave();
}
void run_group(const std::vector<uint32_t>& order) {
  uint32_t n = fibers.size();
  live = n;
  std::fill(epoch, epoch + 2, 1);
  barrier_arrived = 0;
  definitions.clear();
  used_threadgroup = 0;
  arena_used = 0;
  Region& arena = regions[0];  // poisoned for every group; only what some group has used needs it
  std::memset(reinterpret_cast<void*>(arena.start), 0xff, arena_dirty);
  std::fill_n(arena.cells.begin(), std::min((arena_dirty >> arena.shift) + 1, arena.cells.size()), Cell{});
  while (live && !aborted) {
    bool progress = false;
    for (uint32_t i : order) {
      if (fibers[i].state != READY) continue;
      progress = true;
      current = &fibers[i];
      emu_switch(&main_sp, current->sp);
      current = nullptr;
      if (aborted) return;
    }
    if (!progress) { describe_stall(); aborted = true; }
  }
}

int module_callback(dl_phdr_info* info, size_t, void* inside) {
  uintptr_t low = ~0ull, high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    low = std::min<uintptr_t>(low, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    high = std::max<uintptr_t>(high, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
  }
  uintptr_t p = reinterpret_cast<uintptr_t>(inside);
  if (p >= low && p < high) modules.push_back({low, high});
  return 0;
}
}  // namespace

extern "C" {
void emu_kernel(void** buffers, EmuThread* self);

EmuThread* emu_self() { return &current->self; }

void* emu_threadgroup(int id, size_t bytes, size_t align, int line) {
  for (auto& d : definitions) if (d.id == id) return reinterpret_cast<void*>(regions[0].start + d.offset);
  used_threadgroup = (used_threadgroup + align - 1) / align * align + bytes;
  if (used_threadgroup > threadgroup_limit || definitions.size() == MAX_ARRAYS) {
    report("threadgroup memory", 0, "line %d needs %zu bytes in %zu arrays, %zu bytes are allowed", line, used_threadgroup, definitions.size() + 1, threadgroup_limit);
    fatal();
  }
  max_threadgroup = std::max(max_threadgroup, used_threadgroup);
  size_t offset = (arena_used + RED_ZONE + 63) / 64 * 64;
  arena_used = offset + bytes;
  arena_dirty = std::max(arena_dirty, arena_used);
  definitions.push_back({id, offset, bytes});
  return reinterpret_cast<void*>(regions[0].start + offset);
}

void emu_barrier(int kind, int flags, int line) {
  Fiber& f = *current;
  f.op = kind ? "simdgroup_barrier" : "threadgroup_barrier";
  f.line = line;
  f.state = kind ? SIMD_BARRIER : BARRIER;
  Simdgroup& s = simdgroups[f.self.simdgroup];
  uint32_t first = kind ? s.first : 0, count = kind ? s.lanes : fibers.size();
  uint32_t& arrived = kind ? s.arrived : barrier_arrived;
  for (uint32_t i = first; i < first + count; ++i)
    if (fibers[i].state == f.state && fibers[i].line != line) { describe_stall(); fatal(); }
  if (++arrived == count) {
    arrived = 0;
    for (uint32_t i = first; i < first + count; ++i) fibers[i].state = READY;
    if (flags & 2) ++(kind ? s.epoch[0] : epoch[0]);
    if (flags & 1) ++(kind ? s.epoch[1] : epoch[1]);
  } else {
    leave();
  }
}

char* emu_meet(const void* value, size_t bytes, const char* op, int line, EmuCombine combine) {
  Fiber& f = *current;
  Simdgroup& s = simdgroups[f.self.simdgroup];
  uint32_t parity = s.parity;
  std::memcpy(s.slots[parity][f.self.lane], value, bytes);
  f.op = op;
  f.line = line;
  f.state = MEET;
  for (uint32_t i = s.first; i < s.first + s.lanes; ++i)
    if (fibers[i].state != READY && (fibers[i].state != MEET || fibers[i].line != line || std::strcmp(fibers[i].op, op)))
      { describe_stall(); fatal(); }
  if (++s.arrived == s.lanes) {
    s.arrived = 0;
    s.parity ^= 1;
    Fiber* keep = current;
    current = nullptr;  // the combine step is the machine's, not the thread's
    if (combine) combine(&s.slots[parity][0][0], s.lanes);
    current = keep;
    for (uint32_t i = s.first; i < s.first + s.lanes; ++i) fibers[i].state = READY;
  } else {
    leave();
  }
  return &s.slots[parity][0][0];
}

uint32_t emu_atomic(void* address, int op, uint32_t value, int is_signed, void*) {
  uintptr_t pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uintptr_t a = reinterpret_cast<uintptr_t>(address);
  if (op != 1) access(a, 4, false, pc, true);
  if (op != 0) access(a, 4, true, pc, true);
  uint32_t* p = static_cast<uint32_t*>(address);
  uint32_t old = *p;
  bool less = is_signed ? int32_t(value) < int32_t(old) : value < old;
  float sum;
  switch (op) {
    case 1: case 2: *p = value; break;
    case 3: *p = old + value; break;
    case 4: *p = old - value; break;
    case 5: if (less) *p = value; break;
    case 6: if (!less) *p = value; break;
    case 7: *p = old | value; break;
    case 8: *p = old & value; break;
    case 9: *p = old ^ value; break;
    case 10: { float x, y; std::memcpy(&x, &old, 4); std::memcpy(&y, &value, 4); sum = x + y; std::memcpy(p, &sum, 4); break; }
  }
  return old;
}

#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define A(p) reinterpret_cast<uintptr_t>(p)
#define HOOKS(n)                                                              \
  void __tsan_read##n(void* p) { access(A(p), n, false, PC); }                 \
  void __tsan_write##n(void* p) { access(A(p), n, true, PC); }                 \
  void __tsan_unaligned_read##n(void* p) { access(A(p), n, false, PC, false, false); } \
  void __tsan_unaligned_write##n(void* p) { access(A(p), n, true, PC, false, false); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* p, size_t n) { access(A(p), n, false, PC, false, false); }
void __tsan_write_range(void* p, size_t n) { access(A(p), n, true, PC, false, false); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}

struct EmuBuffer { const char* name; void* data; uint64_t size; int32_t itemsize, writable, initialised; uint64_t loaded, touched, stored; };
struct EmuLaunch {
  EmuBuffer* buffers;
  int32_t num_buffers;
  uint32_t grid[3], group[3];
  int32_t order;          // 0 forward, 1 reverse, 2 shuffled
  uint32_t seed;
  int32_t check, byte_granules;
  uint64_t threadgroup_limit, step_limit;
  uint64_t threadgroup_used, groups;  // results
  Error* errors;
  int32_t num_errors;
};

int emu_launch(EmuLaunch* launch) {
  if (!base) {
    base = static_cast<char*>(mmap(nullptr, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    dl_iterate_phdr(module_callback, reinterpret_cast<void*>(&emu_kernel));
  }
  regions.clear(); errors.clear();
  checking = launch->check; aborted = false; steps = 0; step_limit = launch->step_limit;
  max_threadgroup = 0; threadgroup_limit = launch->threadgroup_limit; arena_dirty = 0;
  uintptr_t next = reinterpret_cast<uintptr_t>(base) + GAP;
  auto add = [&](const char* name, size_t size, int shift, bool writable, bool shadow, bool threadgroup) {
    Region r{};
    std::snprintf(r.name, sizeof r.name, "%s", name);
    size_t pages = (size + PAGE) / PAGE * PAGE;
    mprotect(reinterpret_cast<void*>(next), pages, PROT_READ | PROT_WRITE);
    r.start = next; r.size = size; r.shift = shift; r.writable = writable; r.threadgroup = threadgroup;
    if (shadow) r.cells.resize((size >> shift) + 1);
    else r.touched.resize(launch->check ? size : 0);
    next += (pages + GAP - 1) / GAP * GAP + GAP;
    if (threadgroup) std::memset(reinterpret_cast<void*>(r.start), 0xff, size);
    regions.push_back(std::move(r));
  };
  size_t limit = launch->threadgroup_limit + MAX_ARRAYS * (RED_ZONE + 64);
  add("threadgroup memory", limit, launch->byte_granules ? 0 : 1, true, launch->check, true);
  std::vector<void*> pointers;
  for (int i = 0; i < launch->num_buffers; ++i) {
    EmuBuffer& b = launch->buffers[i];
    int shift = b.itemsize >= 4 ? 2 : b.itemsize == 2 ? 1 : 0;
    add(b.name, b.size, shift, b.writable, launch->check && b.writable, false);
    Region& r = regions.back();
    std::memcpy(reinterpret_cast<void*>(r.start), b.data, b.size);
    for (auto& c : r.cells) c.written = b.initialised;
    pointers.push_back(reinterpret_cast<void*>(r.start));
  }
  entry = emu_kernel;
  entry_buffers = pointers.data();
  uint32_t groups[3], total = 1;
  for (int i = 0; i < 3; ++i) { groups[i] = (launch->grid[i] + launch->group[i] - 1) / launch->group[i]; total *= groups[i]; }
  std::mt19937 random(launch->seed);
  std::vector<uint32_t> group_order(total);
  std::iota(group_order.begin(), group_order.end(), 0u);
  if (launch->order == 1) std::reverse(group_order.begin(), group_order.end());
  if (launch->order == 2) std::shuffle(group_order.begin(), group_order.end(), random);
  for (uint32_t id : group_order) {
    if (aborted) break;
    uint32_t g[3] = {id % groups[0], id / groups[0] % groups[1], id / groups[0] / groups[1]}, size[3], n = 1;
    for (int i = 0; i < 3; ++i) { size[i] = std::min(launch->group[i], launch->grid[i] - g[i] * launch->group[i]); n *= size[i]; }
    group_id = id;
    if (n > stack_count) {
      if (stacks) munmap(stacks, stack_count * STACK);
      stacks = static_cast<char*>(mmap(nullptr, n * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      stack_count = n;
    }
    fibers.assign(n, Fiber{});
    simdgroups.assign((n + 31) / 32, Simdgroup{});
    for (uint32_t i = 0; i < n; ++i) {
      EmuThread& t = fibers[i].self;
      uint32_t p[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
      for (int a = 0; a < 3; ++a) {
        t.position_in_group[a] = p[a]; t.group_position[a] = g[a]; t.threads_per_grid[a] = launch->grid[a];
        t.position_in_grid[a] = g[a] * launch->group[a] + p[a]; t.groups_per_grid[a] = groups[a];
        t.threads_per_group[a] = size[a]; t.dispatch_threads_per_group[a] = launch->group[a];
      }
      t.index = i; t.lane = i % 32; t.simdgroup = i / 32; t.simdgroups = simdgroups.size(); t.lanes = std::min(32u, n - i / 32 * 32);
      Simdgroup& s = simdgroups[i / 32];
      s.lanes = t.lanes; s.first = i / 32 * 32; s.epoch[0] = s.epoch[1] = 1;
      fibers[i].state = READY;
      fibers[i].sp = fiber_new(stacks + i * STACK);
    }
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    if (launch->order == 1) std::reverse(order.begin(), order.end());
    if (launch->order == 2) std::shuffle(order.begin(), order.end(), random);
    run_group(order);
  }
  current = nullptr;
  for (int i = 0; i < launch->num_buffers; ++i) {
    EmuBuffer& b = launch->buffers[i];
    Region& r = regions[i + 1];
    if (b.writable) std::memcpy(b.data, reinterpret_cast<void*>(r.start), b.size);
    size_t missing = 0, first = 0;
    for (size_t c = 0; !aborted && b.size && c < b.size >> r.shift && !r.cells.empty(); ++c)
      if (!r.cells[c].written && !missing++) first = c;
    if (missing) report("unwritten", 0, "output %s: %zu of %zu elements were never written, the first is %zu", r.name, missing, size_t(b.size >> r.shift), first);
    b.loaded = r.loaded; b.stored = r.stored;
    b.touched = std::count(r.touched.begin(), r.touched.end(), 1);
  }
  for (auto& r : regions) {  // give the pages back and make strays fault again
    size_t pages = (r.size + PAGE) / PAGE * PAGE;
    mmap(reinterpret_cast<void*>(r.start), pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  launch->threadgroup_used = max_threadgroup;
  launch->groups = total;
  launch->num_errors = errors.size();
  std::copy(errors.begin(), errors.end(), launch->errors);
  return aborted ? 1 : 0;
}
}
