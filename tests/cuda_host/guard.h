// Memory that notices what goes beyond it, part of runtime.cpp.
//
// A plain build needs no sanitizer to see an access out of bounds: every buffer of a launch is a copy that ends where
// its last page does (but for 15 bytes at most), with unmapped address space round it, and is mapped read-only where
// every kernel parameter that names it is const. A fault ends the launch with the address in words. The bytes between
// a buffer and its pages' borders hold a pattern that is checked after the launch. Misaligned vector accesses and the
// like are found by the compiler's checks (-fsanitize=alignment,...), whose handlers are below.
#ifndef KVEMU_GUARD_H
#define KVEMU_GUARD_H

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>

static const unsigned char POISON = 0xFF;  // NaN in every float type, -1 in every integer type

namespace {

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if defined(KVEMU_TSAN)

// One arena with a piece for every block: blocks that shared addresses would look like a race.
class SharedMemory {
 public:
  SharedMemory(unsigned bytes, uint64_t num_blocks) : piece_(round_up(bytes, 128) + 128) {
    void* p = nullptr;
    if (bytes && posix_memalign(&p, 128, piece_ * num_blocks)) abort();
    arena_ = static_cast<unsigned char*>(p);
    if (arena_) memset(arena_, POISON, piece_ * num_blocks);
  }
  ~SharedMemory() { free(arena_); }
  unsigned char* begin(uint64_t i) { return arena_ ? arena_ + piece_ * i : nullptr; }
  void check() {}

 private:
  size_t piece_;
  unsigned char* arena_;
};

#elif defined(KVEMU_ASAN)

// A fresh block of the heap, exactly as large as asked for: ASan sees one byte too far.
class SharedMemory {
 public:
  SharedMemory(unsigned bytes, uint64_t) : bytes_(bytes) {}
  ~SharedMemory() { free(memory_); }
  unsigned char* begin(uint64_t) {
    free(memory_);
    memory_ = nullptr;
    if (!bytes_) return nullptr;
    void* p = nullptr;
    if (posix_memalign(&p, 128, bytes_)) abort();
    memset(p, POISON, bytes_);
    return memory_ = static_cast<unsigned char*>(p);
  }
  void check() {}

 private:
  unsigned bytes_;
  unsigned char* memory_ = nullptr;
};

#endif

#if !defined(KVEMU_TSAN) && !defined(KVEMU_ASAN)

// A buffer between unmapped pages.
struct Guarded {
  char *reserved, *pages, *data;
  size_t reserved_bytes, pages_bytes, bytes;
  char name[96];
};
std::vector<Guarded*> guarded;

// `misaligned`: the remainder of the address by `alignment`.
Guarded* guarded_open(size_t bytes, size_t alignment, size_t misaligned, const char* name) {
  auto* g = new Guarded();
  g->bytes = bytes;
  g->pages_bytes = round_up(bytes + 2 * alignment, PAGE);
  size_t beside = size_t{16} << 30;  // a wild block id lands here rather than in somebody's memory
  for (;; beside >>= 4) {
    g->reserved_bytes = g->pages_bytes + 2 * beside;
    void* p = mmap(nullptr, g->reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
      g->reserved = static_cast<char*>(p);
      break;
    }
    if (beside < PAGE) {
      delete g;
      return nullptr;
    }
  }
  g->pages = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(g->reserved) + beside, PAGE));
  if (beside < PAGE || mprotect(g->pages, g->pages_bytes, PROT_READ | PROT_WRITE)) {
    munmap(g->reserved, g->reserved_bytes);
    delete g;
    return nullptr;
  }
  const uintptr_t end = reinterpret_cast<uintptr_t>(g->pages) + g->pages_bytes;
  uintptr_t data = (end - bytes) / alignment * alignment + misaligned;
  if (data + bytes > end) data -= alignment;
  g->data = reinterpret_cast<char*>(data);
  snprintf(g->name, sizeof g->name, "%s", name);
  guarded.push_back(g);
  return g;
}

void guarded_close(Guarded* g) {
  for (size_t i = 0; i < guarded.size(); i++) {
    if (guarded[i] != g) continue;
    guarded.erase(guarded.begin() + i);
    munmap(g->reserved, g->reserved_bytes);
    delete g;
    return;
  }
}

// Fills what lies between the data and the borders of its pages.
void guarded_poison(Guarded* g) {
  memset(g->pages, POISON, g->data - g->pages);
  char* end = g->data + g->bytes;
  memset(end, POISON, g->pages + g->pages_bytes - end);
}

// Where the pattern was overwritten: a negative offset is before the buffer, 0 and more behind it. False: nowhere.
bool guarded_broken(const Guarded* g, long long* offset) {
  for (const char* p = g->data; p-- > g->pages;) {
    if (static_cast<unsigned char>(*p) == POISON) continue;
    *offset = p - g->data;
    return true;
  }
  for (const char* p = g->data + g->bytes; p < g->pages + g->pages_bytes; p++) {
    if (static_cast<unsigned char>(*p) == POISON) continue;
    *offset = p - g->data - (long long)g->bytes;
    return true;
  }
  return false;
}

class SharedMemory {
 public:
  SharedMemory(unsigned bytes, uint64_t) {
    if (bytes && !(memory_ = guarded_open(bytes, 128, 0, "shared memory"))) abort();
    if (memory_) guarded_poison(memory_);
  }
  ~SharedMemory() {
    if (memory_) guarded_close(memory_);
  }
  unsigned char* begin(uint64_t) {
    if (!memory_) return nullptr;
    memset(memory_->data, POISON, memory_->bytes);
    return reinterpret_cast<unsigned char*>(memory_->data);
  }
  void check() {
    long long offset;
    if (memory_ && guarded_broken(memory_, &offset))
      fail("block (%u,%u,%u) wrote %lld byte(s) %s its %zu bytes of shared memory", kvemu_blockIdx.x, kvemu_blockIdx.y,
           kvemu_blockIdx.z, offset < 0 ? -offset : offset + 1, offset < 0 ? "before" : "beyond", memory_->bytes);
  }

 private:
  Guarded* memory_ = nullptr;
};

sigjmp_buf back_to_launch;

struct sigaction before_segv, before_bus, before_fpe, before_ill, before_alarm;

void describe_fault(char* text, size_t size, const char* address, bool write, bool known) {
  const char* what = !known ? "access" : write ? "store" : "load";
  for (const Guarded* g : guarded) {
    if (address < g->reserved || address >= g->reserved + g->reserved_bytes) continue;
    const long long offset = address - g->data;
    if (offset < 0)
      snprintf(text, size, "%s %lld byte(s) before %s", what, -offset, g->name);
    else if (offset >= (long long)g->bytes)
      snprintf(text, size, "%s %lld byte(s) beyond the end of %s (%zu bytes)", what, offset - (long long)g->bytes,
               g->name, g->bytes);
    else
      snprintf(text, size, "store through a pointer to const: %s, byte %lld", g->name, offset);
    return;
  }
  if (current && address >= current->stack - PAGE && address < current->stack)
    snprintf(text, size, "stack overflow of a thread (%zu bytes)", STACK);
  else if (address < reinterpret_cast<char*>(4096))
    snprintf(text, size, "%s through a null pointer", what);
  else
    snprintf(text, size, "%s of an address in no buffer of the launch", what);
}

void on_signal(int signal, siginfo_t* info, void* context) {
  const auto* u = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
  const auto pc = static_cast<uintptr_t>(u->uc_mcontext.gregs[REG_RIP]);
  const bool write = u->uc_mcontext.gregs[REG_ERR] & 2, known = true;
#else
  const auto pc = static_cast<uintptr_t>(u->uc_mcontext.pc);
  const bool write = false, known = false;
#endif
  if (!current) {  // the runtime's own fault, or somebody else's thread
    const struct sigaction& before = signal == SIGBUS ? before_bus : before_segv;
    sigaction(signal, &before, nullptr);
    return;
  }
  char what[256];
  if (signal == SIGSEGV || signal == SIGBUS)
    describe_fault(what, sizeof what, static_cast<const char*>(info->si_addr), write, known);
  else if (signal == SIGFPE)
    snprintf(what, sizeof what, "integer division by zero or overflow");
  else if (signal == SIGILL)
    snprintf(what, sizeof what, "illegal instruction");
  else
    snprintf(what, sizeof what, "still running after the processor time a launch may take");
  Dl_info module{};
  dladdr(reinterpret_cast<void*>(pc), &module);
  const kvemu_dim t = current->thread, b = kvemu_blockIdx;
  fail("%s, thread (%u,%u,%u) of block (%u,%u,%u) @%s+%#llx", what, t.x, t.y, t.z, b.x, b.y, b.z,
       module.dli_fname ? module.dli_fname : "?", (unsigned long long)(pc - reinterpret_cast<uintptr_t>(module.dli_fbase)));
  siglongjmp(back_to_launch, 1);
}

// Turns faults and hangs of the kernel into failures of the launch.
class Watch {
 public:
  explicit Watch(double seconds) {
    stack_t alternative{};
    alternative.ss_sp = stack_;
    alternative.ss_size = sizeof stack_;
    sigaltstack(&alternative, &before_);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
    sigaction(SIGFPE, &action, &before_fpe);
    sigaction(SIGILL, &action, &before_ill);
    if (seconds <= 0) return;
    sigaction(SIGVTALRM, &action, &before_alarm);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    timed_ = !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
    itimerspec after{};
    after.it_value.tv_sec = static_cast<time_t>(seconds);
    after.it_value.tv_nsec = static_cast<long>((seconds - double(after.it_value.tv_sec)) * 1e9);
    after.it_interval.tv_sec = 1;  // again, should the first find the scheduler at work
    if (timed_) timer_settime(timer_, 0, &after, nullptr);
  }
  ~Watch() {
    if (timed_) {
      timer_delete(timer_);
      sigaction(SIGVTALRM, &before_alarm, nullptr);
    }
    sigaction(SIGILL, &before_ill, nullptr);
    sigaction(SIGFPE, &before_fpe, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaltstack(&before_, nullptr);
  }
// In the caller's frame, which is the one to come back to.
#define entered() jumped_to(sigsetjmp(back_to_launch, 1))
  bool jumped_to(int from_signal) { return !from_signal; }

 private:
  stack_t before_{};
  timer_t timer_{};
  bool timed_ = false;
  char stack_[64 << 10];
};

#else

// The sanitizers report faults themselves.
class Watch {
 public:
  explicit Watch(double) {}
  bool entered() { return true; }
};

#endif

}  // namespace

// ---- for the Python side: guarded copies of a launch's buffers --------------------------------------------------------

#if defined(KVEMU_TSAN) || defined(KVEMU_ASAN)

// Blocks of the heap, exactly as large as asked for.
KVEMU_EXPORT void* kvemu_guard_open(size_t bytes, size_t misaligned, const char*, void** data) {
  void* p = nullptr;
  if (posix_memalign(&p, 16, bytes + misaligned)) return nullptr;
  *data = static_cast<char*>(p) + misaligned;
  return p;
}
KVEMU_EXPORT int kvemu_guard_protect(void*, int) { return 0; }
KVEMU_EXPORT int kvemu_guard_broken(void*, long long*) { return 0; }
KVEMU_EXPORT void kvemu_guard_close(void* g) { free(g); }

#else

KVEMU_EXPORT void* kvemu_guard_open(size_t bytes, size_t misaligned, const char* name, void** data) {
  Guarded* g = guarded_open(bytes, 16, misaligned, name);
  if (!g) return nullptr;
  guarded_poison(g);
  *data = g->data;
  return g;
}
KVEMU_EXPORT int kvemu_guard_protect(void* g, int writable) {
  auto* buffer = static_cast<Guarded*>(g);
  return mprotect(buffer->pages, buffer->pages_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
}
KVEMU_EXPORT int kvemu_guard_broken(void* g, long long* offset) {
  return guarded_broken(static_cast<Guarded*>(g), offset);
}
KVEMU_EXPORT void kvemu_guard_close(void* g) { guarded_close(static_cast<Guarded*>(g)); }

#endif

// ---- the compiler's checks, in builds without a sanitizer's library ---------------------------------------------------

#if defined(KVEMU_CHECKS)
namespace {
struct SourceLocation {
  const char* file;
  unsigned line, column;
};
struct TypeMismatch {
  SourceLocation at;
  void* type;
  unsigned char log_alignment, kind;
};
void undefined(const SourceLocation& at, const char* what) { kvemu_trap_at(what, at.file, int(at.line)); }
}  // namespace

#define KVEMU_HANDLER __attribute__((visibility("hidden")))
extern "C" {
KVEMU_HANDLER void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t pointer) {
  static char what[128];
  snprintf(what, sizeof what, "misaligned access: address ends in %#x, %u bytes of alignment needed",
           unsigned(pointer & 0xff), 1u << data->log_alignment);
  undefined(data->at, pointer ? what : "null pointer");
}
KVEMU_HANDLER void __ubsan_handle_out_of_bounds_abort(SourceLocation* at, uintptr_t index) {
  static char what[128];
  snprintf(what, sizeof what, "index %lld out of bounds of an array", (long long)index);
  undefined(*at, what);
}
KVEMU_HANDLER void __ubsan_handle_shift_out_of_bounds_abort(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined(*at, "shift out of bounds");
}
KVEMU_HANDLER void __ubsan_handle_add_overflow_abort(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined(*at, "signed overflow of +");
}
KVEMU_HANDLER void __ubsan_handle_sub_overflow_abort(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined(*at, "signed overflow of -");
}
KVEMU_HANDLER void __ubsan_handle_mul_overflow_abort(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined(*at, "signed overflow of *");
}
KVEMU_HANDLER void __ubsan_handle_negate_overflow_abort(SourceLocation* at, uintptr_t) {
  undefined(*at, "signed overflow of unary -");
}
KVEMU_HANDLER void __ubsan_handle_divrem_overflow_abort(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined(*at, "division by zero or overflow");
}
}
#endif

#endif
