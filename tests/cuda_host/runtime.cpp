// The emulator's runtime: fibers, barriers, warp collectives, cp.async, and what the sanitizers must know of them.
//
// Never instrumented itself: it tells ASan and TSan about the fibers by their own interface.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi.h"
#include "collectives.h"
#include "fiber.h"

#if defined(KVEMU_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
void __asan_unpoison_memory_region(void const volatile*, size_t);
}
#endif
#if defined(KVEMU_TSAN)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
static const unsigned NO_SYNC = 1;  // a switch orders nothing: only barriers do
#endif

extern "C" {
kvemu_dim kvemu_threadIdx, kvemu_blockIdx, kvemu_blockDim, kvemu_gridDim;
unsigned char* kvemu_smem;
}

namespace {

enum State { READY, AT_BARRIER, AT_WARP, EXITED };
enum Order { FORWARD, REVERSE, RANDOM };

struct Copy {  // a cp.async that has not landed
  void* dst;
  const void* src;
  int size, src_size, group;
};

struct Fiber {
  void* sp;
  char* stack;
  kvemu_dim thread;
  int index, lane, warp;
  State state;
  int op;
  unsigned mask;
  Lane part;
  const char* file;  // where it waits
  int line;
  int voted;
  bool started;
  char* sync;  // the __syncwarp it takes part in, for TSan
  std::vector<Copy> copies;  // asked for, in order
  size_t landed;             // of them
  int groups;                // committed
  void* tsan;
  void* asan;
};

std::vector<Fiber> fibers;
Fiber* current;
void* main_sp;
void (*entry_point)(void*);
void* entry_closure;
int num_threads, num_exited, num_at_barrier, votes, votes_result, launch_order;
const char* barrier_file;
int barrier_line;
uint32_t arrived[32], exited[32];  // lanes of each warp
char failure[1024];
bool failed, abandoned;
uint64_t random_state;
// Addresses that stand for an order between fibers, for TSan. A fiber goes on from a barrier after another may have
// reached the next one, so neighbouring barriers need two.
[[maybe_unused]] char launch_tag, done_tag, barrier_tags[2], sync_tags[32][64];
[[maybe_unused]] unsigned barriers_passed, syncs[32];
[[maybe_unused]] void* main_tsan;
[[maybe_unused]] const void* main_bottom;
[[maybe_unused]] size_t main_size;
[[maybe_unused]] void* main_asan;

uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  if (failed) return;
  failed = true;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure, sizeof failure, format, arguments);
  va_end(arguments);
}

void to_main() {
  Fiber* me = current;
#if defined(KVEMU_ASAN)
  __sanitizer_start_switch_fiber(me->state == EXITED ? nullptr : &me->asan, main_bottom, main_size);
#endif
#if defined(KVEMU_TSAN)
  __tsan_switch_to_fiber(main_tsan, NO_SYNC);
#endif
  fiber_switch(&me->sp, main_sp);
#if defined(KVEMU_ASAN)
  __sanitizer_finish_switch_fiber(me->asan, &main_bottom, &main_size);
#endif
#if defined(KVEMU_TSAN)
  if (abandoned) {  // never goes on, but what it did is before all that follows the launch
    __tsan_release(&done_tag);
    me->state = EXITED;
    to_main();
  }
#endif
}

void fiber_start() {
#if defined(KVEMU_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
#if defined(KVEMU_TSAN)
  __tsan_acquire(&launch_tag);
#endif
  entry_point(entry_closure);
#if defined(KVEMU_TSAN)
  __tsan_release(&done_tag);
#endif
  Fiber* me = current;
  me->state = EXITED;
  num_exited++;
  exited[me->warp] |= 1u << me->lane;
  to_main();
  abort();
}

void resume(Fiber* fiber) {
  current = fiber;
  fiber->started = true;
  kvemu_threadIdx = fiber->thread;
#if defined(KVEMU_ASAN)
  __sanitizer_start_switch_fiber(&main_asan, fiber->stack, STACK);
#endif
#if defined(KVEMU_TSAN)
  __tsan_switch_to_fiber(fiber->tsan, NO_SYNC);
#endif
  fiber_switch(&main_sp, fiber->sp);
#if defined(KVEMU_ASAN)
  __sanitizer_finish_switch_fiber(main_asan, nullptr, nullptr);
#endif
  current = nullptr;
}

// Never comes back: the scheduler ends the launch.
[[noreturn]] void give_up() {
  current->state = AT_WARP;
  for (;;) to_main();
}

}  // namespace

extern "C" {

int kvemu_lane() { return current->lane; }

void kvemu_trap_at(const char* message, const char* file, int line) {
  const kvemu_dim t = current->thread, b = kvemu_blockIdx;
  fail("%s at %s:%d, thread (%u,%u,%u) of block (%u,%u,%u)", message, base_name(file), line, t.x, t.y, t.z, b.x, b.y, b.z);
  give_up();
}

int kvemu_cp_push(void* dst, const void* src, int size, int src_size, const char* file, int line) {
  if (size != 4 && size != 8 && size != 16) kvemu_trap_at("cp.async of other than 4, 8 or 16 bytes", file, line);
  if (src_size < 0 || src_size > size) kvemu_trap_at("cp.async with an impossible source size", file, line);
  if (reinterpret_cast<uintptr_t>(dst) % size || reinterpret_cast<uintptr_t>(src) % size)
    kvemu_trap_at("cp.async at a misaligned address", file, line);
  if (launch_order == REVERSE || (launch_order == RANDOM && (random_bits() >> 20 & 1))) return 1;
  current->copies.push_back({dst, src, size, src_size, current->groups});
  return 0;
}

void kvemu_cp_commit() { current->groups++; }

int kvemu_cp_pop(int keep_groups, void** dst, const void** src, int* size, int* src_size) {
  auto& copies = current->copies;
  if (current->landed == copies.size()) return 0;
  const Copy copy = copies[current->landed];
  if (copy.group >= current->groups - keep_groups) return 0;
  if (++current->landed == copies.size()) copies.clear(), current->landed = 0;
  *dst = copy.dst, *src = copy.src, *size = copy.size, *src_size = copy.src_size;
  return 1;
}

int kvemu_syncthreads_at(int value, const char* file, int line) {
  Fiber* me = current;
#if defined(KVEMU_TSAN)
  char* const tag = &barrier_tags[barriers_passed % 2];
  __tsan_release(tag);
#endif
  if (num_exited)
    fail("__syncthreads at %s:%d reached by thread %d after %d thread(s) of the block had exited", base_name(file), line,
         me->index, num_exited);
  if (num_at_barrier == 0) {
    barrier_file = file;
    barrier_line = line;
    votes = 0;
  } else if (barrier_line != line || strcmp(barrier_file, file)) {
    fail("divergent __syncthreads: thread %d is at %s:%d, others at %s:%d", me->index, base_name(file), line,
         base_name(barrier_file), barrier_line);
  }
  me->state = AT_BARRIER;
  me->file = file;
  me->line = line;
  votes += value != 0;
  if (++num_at_barrier == num_threads) {
    num_at_barrier = 0;
    barriers_passed++;
    for (auto& fiber : fibers) {
      if (fiber.state != AT_BARRIER) continue;
      fiber.state = READY;
      fiber.voted = votes;
    }
  }
  to_main();
#if defined(KVEMU_TSAN)
  __tsan_acquire(tag);
#endif
  return me->voted;
}

void kvemu_warp_at(int op, unsigned mask, const void* in, void* out, int size, int param, const char* file, int line) {
  Fiber* me = current;
  const int first = me->warp * 32;
  if (first + 32 > num_threads && mask >> (num_threads - first)) {
    fail("warp operation at %s:%d: mask %08x names lanes that the block does not have", base_name(file), line, mask);
    give_up();
  }
  if (!(mask >> me->lane & 1)) {
    fail("warp operation at %s:%d: lane %d is not in its own mask %08x", base_name(file), line, me->lane, mask);
    give_up();
  }
  if (op == KVEMU_SHFL && !(mask >> (param & 31) & 1)) {
    fail("shuffle at %s:%d: lane %d reads lane %d, which is not in the mask %08x", base_name(file), line, me->lane,
         param & 31, mask);
    give_up();
  }
  if ((op == KVEMU_MMA_F16 || op == KVEMU_MMA_BF16) && mask != 0xffffffffu) {
    fail("mma at %s:%d: mask %08x is not a full warp", base_name(file), line, mask);
    give_up();
  }
  if (exited[me->warp] & mask) {
    fail("warp operation at %s:%d: lanes %08x of the mask %08x have exited", base_name(file), line,
         exited[me->warp] & mask, mask);
    give_up();
  }
#if defined(KVEMU_TSAN)
  if (op == KVEMU_SYNCWARP) {
    me->sync = nullptr;
    for (int l = 0; l < 32; l++)
      if ((mask >> l & 1) && fibers[first + l].state == AT_WARP && fibers[first + l].mask == mask)
        me->sync = fibers[first + l].sync;
    if (!me->sync) me->sync = &sync_tags[me->warp][syncs[me->warp]++ % 64];
    __tsan_release(me->sync);
  }
#endif
  me->op = op;
  me->mask = mask;
  me->part = {in, out, size, op == KVEMU_SHFL ? param & 31 : param};
  me->file = file;
  me->line = line;
  me->state = AT_WARP;
  uint32_t& here = arrived[me->warp];
  here |= 1u << me->lane;
  if ((here & mask) == mask) {  // the last to arrive does the work and goes straight on
    Lane lanes[32];
    Fiber* base = &fibers[first];
    for (int l = 0; l < 32; l++) {
      if (!(mask >> l & 1)) continue;
      Fiber& other = base[l];
      lanes[l] = other.part;
      if (other.mask == mask && other.op == op && other.line == line && other.part.size == size) continue;
      fail("divergent warp operation: lane %d at %s:%d with mask %08x, lane %d at %s:%d with mask %08x", me->lane,
           base_name(file), line, mask, l, base_name(other.file), other.line, other.mask);
      give_up();
    }
    if (op == KVEMU_SHFL) {
      if (size == 4) shuffle<uint32_t>(lanes, mask);
      else if (size == 8) shuffle<uint64_t>(lanes, mask);
      else shuffle<uint16_t>(lanes, mask);
    } else if (op == KVEMU_BALLOT) {
      ballot(lanes, mask);
    } else if (op == KVEMU_REDUCE) {
      reduce(lanes, mask, param);
    } else if (op != KVEMU_SYNCWARP) {
      mma_m16n8k16(lanes, op == KVEMU_MMA_BF16);
    }
    here &= ~mask;
    for (int l = 0; l < 32; l++)
      if (mask >> l & 1) base[l].state = READY;
  }
  if (me->state != READY) to_main();
#if defined(KVEMU_TSAN)
  if (op == KVEMU_SYNCWARP) __tsan_acquire(me->sync);
#endif
}

}  // extern "C"

#include "guard.h"

namespace {

const char* refused(const kvemu_launch& l) {
  static char why[256];
  const uint64_t threads = uint64_t{l.block[0]} * l.block[1] * l.block[2];
  if (threads < 1 || threads > 1024 || l.block[2] > 64)
    snprintf(why, sizeof why, "a block of %ux%ux%u threads: 1 to 1024 are possible, 64 in z", l.block[0], l.block[1],
             l.block[2]);
  else if (!l.grid[0] || !l.grid[1] || !l.grid[2] || l.grid[0] > 0x7fffffffu || l.grid[1] > 65535 || l.grid[2] > 65535)
    snprintf(why, sizeof why, "a grid of %ux%ux%u blocks: 1 to 2147483647 x 65535 x 65535 are possible", l.grid[0],
             l.grid[1], l.grid[2]);
  else if (l.smem_bytes > 227 * 1024)
    snprintf(why, sizeof why, "%u bytes of dynamic shared memory: over 227 KiB", l.smem_bytes);
  else
    return nullptr;
  return why;
}

void report_deadlock() {
  int at_barrier = 0, at_warp = 0;
  const Fiber *barrier = nullptr, *warp = nullptr;
  for (auto& fiber : fibers) {
    if (fiber.state == AT_BARRIER) at_barrier++, barrier = &fiber;
    if (fiber.state == AT_WARP) at_warp++, warp = &fiber;
  }
  fail("deadlock in block (%u,%u,%u): %d thread(s) at __syncthreads (%s:%d), %d at a warp operation (%s:%d), %d exited",
       kvemu_blockIdx.x, kvemu_blockIdx.y, kvemu_blockIdx.z, at_barrier, barrier ? base_name(barrier->file) : "-",
       barrier ? barrier->line : 0, at_warp, warp ? base_name(warp->file) : "-", warp ? warp->line : 0, num_exited);
}

template <class T>
void shuffle_order(std::vector<T>& order) {
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_bits() % i]);
}

void start_block(const kvemu_launch& launch) {
#if defined(KVEMU_TSAN)
  // A stack that another fiber wrote to would look like a race: mapped anew, TSan forgets the addresses.
  char* const block_stacks = fiber_stacks(num_threads);
#endif
  num_exited = num_at_barrier = 0;
  for (int w = 0; w < 32; w++) arrived[w] = exited[w] = 0;
  for (int i = 0; i < num_threads; i++) {
    Fiber& fiber = fibers[i];
#if defined(KVEMU_TSAN)
    fiber.stack = block_stacks + i * STACK;
    fiber.tsan = __tsan_create_fiber(0);
#endif
#if !defined(KVEMU_TSAN)
    char*& stack = launch.stacks[i];
    fiber.stack = stack ? stack : stack = fiber_stack();
#endif
    fiber.index = i;
    fiber.lane = i & 31;
    fiber.warp = i >> 5;
    fiber.state = READY;
    fiber.groups = 0;
    fiber.copies.clear();
    fiber.landed = 0;
    fiber.started = false;
    const unsigned n = i;
    fiber.thread = {n % launch.block[0], n / launch.block[0] % launch.block[1], n / launch.block[0] / launch.block[1]};
    fiber.sp = fiber_prepare(fiber.stack + STACK, fiber_start);
  }
}

// Resumes fibers, one at a time, until all have exited or something failed.
void run_block(std::vector<uint32_t>& order) {
  while (num_exited < num_threads && !failed) {
    if (launch_order == RANDOM) shuffle_order(order);
    bool any = false;
    for (const uint32_t i : order) {
      if (failed) break;
      if (fibers[i].state != READY) continue;
      any = true;
      resume(&fibers[i]);
    }
    if (!any && !failed) report_deadlock();
  }
}

}  // namespace

int kvemu_run(const kvemu_launch* launch, void (*entry)(void*), void* closure, char* error, int size) {
  if (const char* why = refused(*launch)) {
    snprintf(error, size, "%s", why);
    return 1;
  }
  num_threads = launch->block[0] * launch->block[1] * launch->block[2];
  failed = false;
  entry_point = entry;
  entry_closure = closure;
  launch_order = launch->order;
  random_state = launch->seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  kvemu_gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  kvemu_blockDim = {launch->block[0], launch->block[1], launch->block[2]};
  fibers.assign(num_threads, Fiber());

  const uint64_t num_blocks = uint64_t{launch->grid[0]} * launch->grid[1] * launch->grid[2];
  std::vector<uint64_t> blocks(num_blocks);
  std::vector<uint32_t> threads(num_threads);
  for (uint64_t i = 0; i < num_blocks; i++) blocks[i] = launch->order == REVERSE ? num_blocks - 1 - i : i;
  for (int i = 0; i < num_threads; i++) threads[i] = launch->order == REVERSE ? num_threads - 1 - i : i;
  if (launch->order == RANDOM) shuffle_order(blocks);

  SharedMemory shared(launch->smem_bytes, num_blocks);
  [[maybe_unused]] std::vector<void*> past;
#if defined(KVEMU_TSAN)
  main_tsan = __tsan_get_current_fiber();
  __tsan_release(&launch_tag);
#endif
  Watch watch(launch->seconds);
  if (watch.entered()) {
    for (uint64_t i = 0; i < num_blocks && !failed; i++) {
      const uint64_t b = blocks[i];
      kvemu_blockIdx = {unsigned(b % launch->grid[0]), unsigned(b / launch->grid[0] % launch->grid[1]),
                        unsigned(b / launch->grid[0] / launch->grid[1])};
      kvemu_smem = shared.begin(i);
      start_block(*launch);
      run_block(threads);
#if defined(KVEMU_TSAN)
      // TSan gives a new fiber the id of a dead one, and two accesses with one id are never a race: the fibers of
      // earlier blocks are kept as long as its table (8,128 entries) allows.
      for (auto& fiber : fibers) past.push_back(fiber.tsan);
      if (past.size() + num_threads > 4000) {
        for (void* fiber : past) __tsan_destroy_fiber(fiber);
        past.clear();
      }
#endif
#if defined(KVEMU_TSAN)
      abandoned = failed;
      if (failed)
        for (auto& fiber : fibers)
          if (fiber.started && fiber.state != EXITED) resume(&fiber);
      abandoned = false;
#endif
#if defined(KVEMU_ASAN)
      if (failed)
        for (auto& fiber : fibers) __asan_unpoison_memory_region(fiber.stack, STACK);
#endif
      if (!failed) shared.check();
      kvemu_smem = nullptr;
    }
  }
#if defined(KVEMU_TSAN)
  for (void* fiber : past) __tsan_destroy_fiber(fiber);
  __tsan_acquire(&done_tag);
#endif
  current = nullptr;
  if (failed) snprintf(error, size, "%s", failure);
  return failed;
}
