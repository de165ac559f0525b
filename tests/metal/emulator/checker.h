// The checker: bounds, uninitialised reads, races by barrier epochs, writes to inputs, bytes moved.
#pragma once
#include "machine.h"

namespace {
inline void leave() { emu_switch(&current->sp, main_sp); }

void report(const char* kind, uintptr_t pc, const char* format, ...) {
  if (errors.size() >= 24) return;
  Error e{};
  std::snprintf(e.kind, sizeof e.kind, "%s", kind);
  va_list args;
  va_start(args, format);
  std::vsnprintf(e.text, sizeof e.text, format, args);
  va_end(args);
  e.pc = pc;
  for (auto& m : modules) if (pc >= m.first && pc < m.second) e.pc = pc - m.first;
  for (auto& o : errors) if (!std::strcmp(o.kind, e.kind) && o.pc == e.pc) return;  // one report a place
  errors.push_back(e);
}
[[noreturn]] void fatal() {
  aborted = true;
  for (;;) leave();
}

Region* region_of(uintptr_t address) {
  for (auto& r : regions)
    if (address >= r.start - GAP / 2 && address < r.start + r.size + GAP / 2) return &r;
  return nullptr;
}

void race(const Region& r, size_t offset, const char* what, uint32_t other_group, uint16_t other, uintptr_t pc) {
  const char* who = other == MANY ? "several threads" : "thread";
  report("race", pc, "%s of %s byte %zu by thread %u of group %u races with %s %d of group %d (no barrier with the right flag between)",
         what, r.name, offset, current->self.index, group_id, who, other == MANY ? 0 : other, int(other_group));
}

void touch(Region& r, size_t offset, size_t n, bool write, bool atomic, uintptr_t pc) {
  const uint32_t ep = epoch[r.threadgroup ? 0 : 1];
  const uint16_t me = current->self.index, sg = current->self.simdgroup;
  const uint32_t sep = simdgroups[sg].epoch[r.threadgroup ? 0 : 1];
  for (size_t g = offset >> r.shift; g <= (offset + n - 1) >> r.shift; ++g) {
    Cell& c = r.cells[g];
    if (!write && !c.written)
      report("uninitialised", pc, "%s byte %zu read by thread %u of group %u before any write", r.name, g << r.shift, me, group_id);
    if (c.wgroup != NONE && !atomic) {
      bool ordered = c.wgroup == group_id && (c.wthread == me || c.wepoch != ep || (c.wsg == sg && c.wsimd_epoch != sep));
      if (!ordered) race(r, g << r.shift, write ? "write" : "read", c.wgroup, c.wthread, pc);
    }
    if (write) {
      if (c.rgroup != NONE && !atomic) {
        bool ordered = c.rgroup == group_id && (c.repoch != ep || c.rthread == me || (c.rsg == sg && c.rsimd_epoch != sep));
        if (!ordered) race(r, g << r.shift, "write", c.rgroup, c.rthread, pc);
      }
      c.written = true;
      if (!atomic) { c.wgroup = group_id; c.wepoch = ep; c.wsimd_epoch = sep; c.wthread = me; c.wsg = sg; }
    } else if (!atomic) {
      if (c.rgroup != NONE && c.rgroup != group_id) c.rgroup = NONE - 1;  // several groups
      else if (c.rgroup == NONE || c.repoch != ep) { c.rgroup = group_id; c.repoch = ep; c.rsimd_epoch = sep; c.rthread = me; c.rsg = sg; }
      else if (c.rsg != sg) { c.rsg = MANY; c.rthread = MANY; }
      else if (c.rsimd_epoch != sep) { c.rsimd_epoch = sep; c.rthread = me; }
      else if (c.rthread != me) c.rthread = MANY;
    }
  }
}

inline void access(uintptr_t address, size_t n, bool write, uintptr_t pc, bool atomic = false, bool aligned = true) {
  if (!current) return;
  uintptr_t offset = address - reinterpret_cast<uintptr_t>(base);
  if (++steps > step_limit) { report("endless", pc, "more than %llu memory accesses", (unsigned long long)step_limit); fatal(); }
  if (offset >= SPAN) {
    uintptr_t s = reinterpret_cast<uintptr_t>(stacks);
    if (address - s < stack_count * STACK) return;
    for (auto& m : modules) if (address >= m.first && address < m.second) return;
    uintptr_t t = reinterpret_cast<uintptr_t>(simdgroups.data());
    if (address - t < simdgroups.size() * sizeof(Simdgroup)) return;
    uintptr_t f = reinterpret_cast<uintptr_t>(fibers.data());
    if (address - f < fibers.size() * sizeof(Fiber)) return;
    report("bounds", pc, "%s of %zu bytes at a wild address by thread %u of group %u", write ? "write" : "read", n, current->self.index, group_id);
    fatal();
  }
  Region* r = region_of(address);
  if (!r || address < r->start || address + n > r->start + r->size) {
    report("bounds", pc, "%s of %zu bytes at byte %lld of %s (%zu bytes) by thread %u of group %u", write ? "write" : "read", n,
           r ? (long long)(address - r->start) : 0ll, r ? r->name : "no buffer", r ? r->size : size_t(0), current->self.index, group_id);
    fatal();
  }
  size_t at = address - r->start;
  if (r->threadgroup) {
    bool inside = false;
    for (auto& d : definitions) inside |= at >= d.offset && at + n <= d.offset + d.bytes;
    if (!inside) {
      report("bounds", pc, "%s of %zu bytes outside every threadgroup array by thread %u of group %u", write ? "write" : "read", n, current->self.index, group_id);
      fatal();
    }
  }
  if (aligned && n > 1 && (address & (n - 1)))
    { report("alignment", pc, "%zu-byte access at byte %zu of %s", n, at, r->name); fatal(); }
  if (write) {
    if (!r->writable) { report("input", pc, "write to input %s, byte %zu, by thread %u", r->name, at, current->self.index); fatal(); }
    r->stored += n;
  } else {
    r->loaded += n;
    if (!r->touched.empty()) std::memset(&r->touched[at], 1, n);
  }
  if (!r->cells.empty()) touch(*r, at, n, write, atomic, pc);
}

void describe_stall() {
  char text[200] = "";
  int shown = 0;
  for (auto& f : fibers) {
    if (f.state == READY) continue;  // still on its way
    bool fresh = true;
    for (auto& o : fibers) { if (&o == &f) break; if (o.state == f.state && o.line == f.line && o.op == f.op) fresh = false; }
    if (!fresh || shown++ > 3) continue;
    size_t n = std::strlen(text);
    std::snprintf(text + n, sizeof text - n, "%sthread %u %s", n ? "; " : "", f.self.index, f.state == DONE ? "returned" : "is at ");
    n = std::strlen(text);
    if (f.state != DONE) std::snprintf(text + n, sizeof text - n, "%s (line %d)", f.op, f.line);
  }
  report("divergence", 0, "%s", text);
}

}  // namespace
