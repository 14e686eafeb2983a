// Device memory. An allocation is filled with poison and lies between two pages that may not be accessed. Its size is rounded up to a
// multiple of 256 bytes; the bytes behind its end keep their poison as a canary. Shared arrays are parts of a worker's arena.
#pragma once
#include <string.h>
#include <sys/mman.h>
#include <map>
#include "scheduler.h"

static char* map_pages(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

// What the checker remembers of a piece of memory: its last writer, and the readers that a later write could race with.
struct Cell {
  uint32_t write_tick, read_tick, read2_tick, other_block_tick;
  Where write_where, read_where;
  uint16_t writer, reader, reader2;
  uint8_t state;  // CellState
  uint8_t unused;
};
enum CellState : uint8_t { PLAIN, ATOMIC, IN_FLIGHT, BULK };  // BULK: written by a bulk copy, which needs no fence before wgmma

// The cells of a range of memory, one for each piece. Pieces have 16 bytes at first. The first access that is not a whole number of
// pieces makes all pieces smaller. No history is lost: all accesses before were of whole pieces. A cell for each byte would cost far more.
struct Shadow {
  Cell* cells = nullptr;
  size_t bytes = 0;
  size_t piece = 16;

  size_t mapped(size_t piece_bytes) const { return (bytes / piece_bytes + 1) * sizeof(Cell); }
  bool make(size_t size) {
    bytes = size;
    cells = reinterpret_cast<Cell*>(map_pages(mapped(piece), PROT_READ | PROT_WRITE));  // untouched pages cost nothing
    return cells;
  }
  void drop() {
    if (cells) munmap(cells, mapped(piece));
    cells = nullptr;
  }
  void forget() const {
    if (cells) madvise(cells, mapped(piece), MADV_DONTNEED);
  }
  static size_t pieces_for(size_t offset, size_t size) {  // the largest piece of which the access is a whole number
    const size_t odd = offset | size | 16;
    return odd & (~odd + 1);
  }
  // Makes pieces smaller. Cells without an access at tick `since` or later are not kept.
  bool cut(size_t smaller, uint32_t since) {
    Cell* fine = reinterpret_cast<Cell*>(map_pages(mapped(smaller), PROT_READ | PROT_WRITE));
    if (!fine) return false;
    for (size_t i = 0; i < bytes / piece + 1; ++i) {
      const Cell& old = cells[i];
      if (old.write_tick < since && old.read_tick < since) continue;
      for (size_t j = 0; j < piece / smaller && i * piece + j * smaller < bytes; ++j) fine[i * (piece / smaller) + j] = old;
    }
    munmap(cells, mapped(piece));
    cells = fine;
    piece = smaller;
    return true;
  }
};

struct Allocation {
  char* base;
  size_t mapped;
  char* p;
  size_t bytes;
  // checker
  Shadow shadow;
  unsigned char* written = nullptr;  // for each byte, whether it was written
};

// The key is the allocation's last address, so that lower_bound finds the allocation that holds an address. The map is never destroyed:
// kernels may run while the process ends. It has no lock: kdgen/backends/cpu.py makes one call at a time.
static std::map<uintptr_t, Allocation>& allocations = *new std::map<uintptr_t, Allocation>;

static Allocation* find_allocation(uintptr_t p) {
  auto& all = allocations;
  auto it = all.lower_bound(p);
  return it != all.end() && p >= reinterpret_cast<uintptr_t>(it->second.p) ? &it->second : nullptr;
}
// The allocation nearest to p, for messages. Null: none is within 1 MiB.
static Allocation* nearest_allocation(uintptr_t p) {
  const uintptr_t near = 1 << 20;
  auto& all = allocations;
  auto after = all.lower_bound(p);
  Allocation* best = nullptr;
  uintptr_t distance = near;
  if (after != all.end()) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(after->second.p);
    const uintptr_t d = p >= start ? 0 : start - p;
    if (d < distance) {
      best = &after->second;
      distance = d;
    }
  }
  if (after != all.begin()) {
    --after;
    if (p - after->first < distance) best = &after->second;
  }
  return best;
}

EMU_API void* emu_alloc(size_t bytes) {  // null: out of memory
  const size_t body = (bytes + 255) & ~size_t(255);
  const size_t pages = (body + PAGE - 1) & ~(PAGE - 1);
  char* base = map_pages(pages + 2 * PAGE, PROT_NONE);
  if (!base) return nullptr;
  if (mprotect(base + PAGE, pages, PROT_READ | PROT_WRITE)) {
    munmap(base, pages + 2 * PAGE);
    return nullptr;
  }
  memset(base + PAGE, POISON, pages);
  char* p = base + PAGE + pages - body;
  allocations[reinterpret_cast<uintptr_t>(p) + (bytes ? bytes - 1 : 0)] =
      Allocation{base, pages + 2 * PAGE, p, bytes, Shadow{}, nullptr};
  return p;
}

static bool all_poison(const char* start, const char* end) {  // each byte equals the one before it; memcmp is fast
  if (start == end) return true;
  return static_cast<unsigned char>(*start) == POISON && !memcmp(start, start + 1, static_cast<size_t>(end - start) - 1);
}
static bool canary_intact(const Allocation& a) {
  return all_poison(a.p + a.bytes, a.base + a.mapped - PAGE) && all_poison(a.base + PAGE, a.p);
}

EMU_API void emu_free(void* p) {
  Allocation* a = find_allocation(reinterpret_cast<uintptr_t>(p));
  if (!a || a->p != p) return;
  a->shadow.drop();
  if (a->written) munmap(a->written, a->bytes);
  munmap(a->base, a->mapped);
  allocations.erase(reinterpret_cast<uintptr_t>(p) + (a->bytes ? a->bytes - 1 : 0));
}

// Adopts memory that other processes share. Kernels may use it; the checker ignores it.
EMU_API void emu_adopt(void* p, size_t bytes) {
  char* start = static_cast<char*>(p);
  allocations[reinterpret_cast<uintptr_t>(p) + bytes - 1] = Allocation{start - PAGE, bytes + 2 * PAGE, start, bytes, Shadow{}, nullptr};
}
EMU_API void emu_disown(void* p, size_t bytes) { allocations.erase(reinterpret_cast<uintptr_t>(p) + bytes - 1); }

static bool watched(const Allocation* a) { return a->shadow.cells && a->written; }
// Makes the checker watch this allocation. Its bytes count as uninitialised until the host or a kernel writes them.
EMU_API int emu_watch(void* p) {
  Allocation* a = find_allocation(reinterpret_cast<uintptr_t>(p));
  if (!a) return 0;
  a->written = reinterpret_cast<unsigned char*>(map_pages(a->bytes, PROT_READ | PROT_WRITE));
  return a->shadow.make(a->bytes) && a->written;
}
EMU_API void emu_host_wrote(void* p, size_t bytes) {
  Allocation* a = find_allocation(reinterpret_cast<uintptr_t>(p));
  if (a && watched(a)) memset(a->written + (static_cast<char*>(p) - a->p), 1, bytes);
}

// Fills it with poison. If the checker watches it, its bytes count as uninitialised again.
EMU_API void emu_forget(void* p, size_t bytes) {
  Allocation* a = find_allocation(reinterpret_cast<uintptr_t>(p));
  memset(p, POISON, bytes);
  if (a && watched(a)) memset(a->written + (static_cast<char*>(p) - a->p), 0, bytes);
}

// ---- shared memory --------------------------------------------------------
// Returns the shared array of a declaration (`site`): all threads of a block get the same one.
EMU_API void* emu_shared_array(const void* site, size_t bytes, size_t align, int line) {
  Worker* w = current();
  for (const SharedArray& a : w->arrays)
    if (a.site == site) return a.p;
  const size_t start = (w->arena_used + align - 1) & ~(align - 1);
  size_t total = bytes;
  for (const SharedArray& a : w->arrays) total += a.bytes;
  if (total > STATIC_LIMIT || start + bytes + RED_ZONE > STATIC_ARENA)
    fail(w, {current_lane(w), at_line(line)}, "%zu bytes of static shared memory; a block may have %zu", total, STATIC_LIMIT);
  if (total + w->launch->shared_bytes > SHARED_LIMIT)
    fail(w, {current_lane(w), at_line(line)}, "%zu bytes of static and %u of dynamic shared memory; a block may have %zu", total,
         w->launch->shared_bytes, SHARED_LIMIT);
  char* p = w->arena + start;
  w->arena_used = start + bytes + RED_ZONE;
  memset(p, POISON, bytes);
  w->arrays.push_back({site, p, bytes});
  return p;
}
