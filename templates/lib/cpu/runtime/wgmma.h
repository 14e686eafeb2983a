// wgmma. A warp's part, 16 rows, is performed for its 32 lanes at once. Without LATE_COPIES, the call performs it. With LATE_COPIES, the
// warp's wait does, and results hold poison until then. Hardware may read operands at any time between the two, so the checker sees them
// read twice, at the call and when it is performed, by lane 0 for the whole warp.
#pragma once
#include "barriers.h"

typedef float WgmmaRow __attribute__((vector_size(32), aligned(32)));

// The address of 16 bytes of an operand; `at` is where they would lie without the swizzle.
static const char* wgmma_piece(Worker* w, uint64_t tile, uint64_t at) {
  const uint64_t linear = ((tile & 0x3fff) << 4) + at;
  return w->dynamic_shared + (linear ^ (linear >> 7 & 7) << 4);
}
static uint64_t next_rows(uint64_t tile) { return (tile >> 32 & 0x3fff) << 4; }
static uint64_t next_tile(uint64_t tile) { return (tile >> 16 & 0x3fff) << 4; }

// Calls visit(address, row, column) for every 8 numbers of a matrix that lie side by side: 8 columns of a row, or, by columns, 8 rows of a
// column.
template <class Visit>
static void visit_operand(Worker* w, uint64_t tile, int first_row, int rows, bool by_columns, Visit visit) {
  if (by_columns) {
    for (int k = 0; k < WGMMA_K; ++k)
      for (int row = first_row; row < first_row + rows; row += 8)
        visit(wgmma_piece(w, tile, row / 64 * next_tile(tile) + k / 8 * next_rows(tile) + k % 8 * 128 + row % 64 * 2), row, k);
  } else {
    for (int row = first_row; row < first_row + rows; ++row)
      for (int k = 0; k < WGMMA_K; k += 8) visit(wgmma_piece(w, tile, row / 8 * next_rows(tile) + row % 8 * 128 + k * 2), row, k);
  }
}
static inline float widen(const char* p, int i) {
  uint16_t bits;
  memcpy(&bits, p + 2 * i, 2);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static void check_operands(Worker* w, Warp* warp, const EmuWgmma& m, int line) {
  if (!(w->launch->flags & CHECK)) return;
  auto touch = [&](const char* p, int, int) { check_wgmma_read(w, warp->lanes[0], p, at_line(line)); };
  if (!m.a_registers) visit_operand(w, m.a, static_cast<int>(warp->index % 4) * 16, 16, false, touch);
  visit_operand(w, m.b, 0, 2 * m.floats, m.by_columns, touch);
}

static void perform(Worker* w, Warp* warp, const Wgmma& wgmma) {
  auto& [a, b, d] = w->wgmma_operands;
  const EmuWgmma& m = wgmma.lanes[0];
  const int columns = 2 * m.floats, first_row = static_cast<int>(warp->index % 4) * 16;
  check_operands(w, warp, m, wgmma.line);
  if (m.a_registers) {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half)
          a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + half] = widen(reinterpret_cast<const char*>(wgmma.lanes[l].a_registers + i), half);
  } else {
    visit_operand(w, m.a, first_row, 16, false, [&](const char* p, int row, int k) {
      for (int i = 0; i < 8; ++i) a[row - first_row][k + i] = widen(p, i);
    });
  }
  if (m.by_columns)
    visit_operand(w, m.b, 0, columns, true, [&](const char* p, int column, int k) {
      for (int i = 0; i < 8; ++i) b[k][column + i] = widen(p, i);
    });
  else
    visit_operand(w, m.b, 0, columns, false, [&](const char* p, int column, int k) {
      for (int i = 0; i < 8; ++i) b[k + i][column] = widen(p, i);
    });
  for (int row = 0; row < 16; ++row) {
    // In a fragment, lane l has rows l/4 and l/4 + 8, and of every 8 columns 2*(l%4) and the next one.
    const EmuWgmma* lanes = wgmma.lanes + row % 8 * 4;
    const int half = row / 8 * 2;
    for (int c = 0; c < columns; ++c) d[c] = m.accumulate ? lanes[c % 8 / 2].d[c / 8 * 4 + half + c % 2] : 0.0f;
    for (int c = 0; c < columns; c += 8) {
      WgmmaRow sum = *reinterpret_cast<WgmmaRow*>(d + c);
      for (int k = 0; k < WGMMA_K; ++k) sum += a[row][k] * *reinterpret_cast<const WgmmaRow*>(b[k] + c);
      *reinterpret_cast<WgmmaRow*>(d + c) = sum;
    }
    for (int c = 0; c < columns; ++c) lanes[c % 8 / 2].d[c / 8 * 4 + half + c % 2] = d[c];
  }
}

// ---- the queue ------------------------------------------------------------
static bool d_is_pending(const WgmmaQueue& queue, const float* d, size_t before) {
  for (size_t i = 0; i < before; ++i)
    if (queue.pending[i].lanes[0].d == d) return true;
  return false;
}
// Exchanges the contents of every pending d and of queue.results, in the order in which each d was first used.
template <class Exchange>
static void for_pending_results(WgmmaQueue& queue, size_t from, Exchange exchange) {
  size_t at = 0;
  for (size_t i = 0; i < queue.pending.size(); ++i) {
    const Wgmma& wgmma = queue.pending[i];
    if (d_is_pending(queue, wgmma.lanes[0].d, i)) continue;
    const size_t floats = static_cast<size_t>(wgmma.lanes[0].floats);
    if (i >= from) {
      queue.results.resize(std::max(queue.results.size(), at + 32 * floats));
      for (int l = 0; l < 32; ++l) exchange(wgmma.lanes[l].d, queue.results.data() + at + l * floats, floats);
    }
    at += 32 * floats;
  }
}
static void hide_results(float* d, float* results, size_t floats) {
  memcpy(results, d, floats * sizeof(float));
  memset(d, POISON, floats * sizeof(float));
}

static void wgmma_step(EmuWarp* base, unsigned, int line) {
  Worker* w = current();
  Warp* warp = static_cast<Warp*>(base);
  Wgmma wgmma;
  wgmma.line = line;
  for (int l = 0; l < 32; ++l) {
    wgmma.lanes[l] = *static_cast<EmuWgmma*>(warp->operand[l]);
    if (wgmma.lanes[l].a != wgmma.lanes[0].a || wgmma.lanes[l].b != wgmma.lanes[0].b || wgmma.lanes[l].accumulate != wgmma.lanes[0].accumulate)
      fail(w, {warp->lanes[l], at_line(line)}, "wgmma: the lanes of a warp name different operands");
  }
  WgmmaQueue& queue = warp->wgmma;
  if (!queue.fenced) fail(w, {warp->lanes[0], at_line(line)}, "wgmma: there was no wgmma_fence after its registers could last be touched");
  ++queue.issued;
  if (!(w->launch->flags & LATE_COPIES)) return perform(w, warp, wgmma);
  check_operands(w, warp, wgmma.lanes[0], line);
  queue.pending.push_back(wgmma);
  for_pending_results(queue, queue.pending.size() - 1, hide_results);
}
static void wgmma_fence_step(EmuWarp* base, unsigned, int) { static_cast<Warp*>(base)->wgmma.fenced = true; }
static void wgmma_commit_step(EmuWarp* base, unsigned, int) {
  WgmmaQueue& queue = static_cast<Warp*>(base)->wgmma;
  queue.last_group = queue.committed;
  queue.committed = queue.issued;
}
// Performs the wgmma that the warp has issued: all of them, or all but the last group.
static void wait_for_wgmma(EmuWarp* base, int line, bool all) {
  Worker* w = current();
  Warp* warp = static_cast<Warp*>(base);
  WgmmaQueue& queue = warp->wgmma;
  if (queue.committed < queue.issued)
    fail(w, {warp->lanes[0], at_line(line)}, "wgmma_wait_group: %u wgmma were not committed, so nothing waits for them",
         queue.issued - queue.committed);
  for_pending_results(queue, 0, [](float* d, float* results, size_t floats) { memcpy(d, results, floats * sizeof(float)); });
  WgmmaQueue left;
  if (!all) left.issued = left.committed = queue.issued - queue.last_group;
  for (size_t i = 0; i < queue.pending.size(); ++i) {
    if (all || i < queue.last_group) perform(w, warp, queue.pending[i]);
    else left.pending.push_back(queue.pending[i]);
  }
  queue = left;
  for_pending_results(queue, 0, hide_results);
}
static void wait_for_all_groups(EmuWarp* base, unsigned, int line) { wait_for_wgmma(base, line, true); }
static void wait_for_all_groups_but_last(EmuWarp* base, unsigned, int line) { wait_for_wgmma(base, line, false); }

EMU_API uint64_t emu_wgmma_descriptor(const void* tile, unsigned next_tile, int line) {
  Worker* w = current();
  const size_t offset = static_cast<size_t>(static_cast<const char*>(tile) - w->dynamic_shared);
  if (offset >= w->launch->shared_bytes || offset % 1024 || next_tile % 1024)
    fail(w, {current_lane(w), at_line(line)}, "wgmma_descriptor: tiles lie in dynamic shared memory, at multiples of 1024 bytes");
  return offset >> 4 | static_cast<uint64_t>(next_tile >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32;
}
EMU_API void emu_wgmma(EmuWgmma* operands, int line) { collective(current(), ~0u, wgmma_step, operands, line, "wgmma"); }
EMU_API void emu_wgmma_fence(int line) { collective(current(), ~0u, wgmma_fence_step, nullptr, line, "wgmma_fence"); }
EMU_API void emu_wgmma_commit_group(int line) { collective(current(), ~0u, wgmma_commit_step, nullptr, line, "wgmma_commit_group"); }
EMU_API void emu_wgmma_wait_group(int pending, int line) {
  if (pending == 0) collective(current(), ~0u, wait_for_all_groups, nullptr, line, "wgmma_wait_group<0>");
  else collective(current(), ~0u, wait_for_all_groups_but_last, nullptr, line, "wgmma_wait_group<1>");
}
EMU_API void emu_fence_proxy_async() {
  Worker* w = current();
  if (w->launch->flags & CHECK) current_lane(w)->wgmma_fence_tick = next_tick();
}
