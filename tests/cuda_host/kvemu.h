// What a CUDA kernel needs of its compiler and GPU, for g++ and clang: included by cuda/common.cuh under -DKV_EMU.
//
// One fiber per CUDA thread, all fibers of a block on one OS thread, one block after another. A fiber runs until a
// barrier or a warp collective; in which order fibers and blocks go on is an option of the launch, so that code relying
// on an order it has not synchronised gives different answers. The runtime behind these names is runtime.cpp.
//
// A kernel that runs here: `KVEMU_KERNEL(name)` after its definition; shared memory through `KV_SMEM(T, name)` alone;
// PTX only inside wrappers with a C++ twin; no spinning on another block.
//
// The 16 and 8-bit floats and their conversions are NVIDIA's own headers, which have host code.
#ifndef KVEMU_H
#define KVEMU_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __restrict__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__
// A static array would outlive its block and hide a missing initialisation.
#define __shared__ static_assert(false, "shared memory goes through KV_SMEM");

#define kvemu_warp(op, mask, in, out, size, param, width, line) \
  kvemu_warp_at(op, mask, in, out, size, param, __FILE__, line)

#define threadIdx kvemu_threadIdx
#define blockIdx kvemu_blockIdx
#define blockDim kvemu_blockDim
#define gridDim kvemu_gridDim
#define warpSize 32

// ---- barriers -------------------------------------------------------------------------------------------------------

#define __syncthreads() ((void)kvemu_syncthreads_at(0, __FILE__, __LINE__))
#define __syncthreads_count(p) kvemu_syncthreads_at((p) ? 1 : 0, __FILE__, __LINE__)
#define __syncthreads_or(p) (kvemu_syncthreads_at((p) ? 1 : 0, __FILE__, __LINE__) != 0)
#define __syncthreads_and(p) (kvemu_syncthreads_at((p) ? 0 : 1, __FILE__, __LINE__) == 0)
#define __syncwarp(...) kvemu_syncwarp(__FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)
static inline void kvemu_syncwarp(const char* file, int line, unsigned mask = 0xffffffffu) {
  kvemu_warp_at(KVEMU_SYNCWARP, mask, nullptr, nullptr, 0, 0, file, line);
}
#define __trap() kvemu_trap_at("trap", __FILE__, __LINE__)

// ---- warp collectives -----------------------------------------------------------------------------------------------

// `source` says which lane to read, from this lane, the argument and the width.
template <class Source, class T>
static inline T kvemu_shuffle(Source source, unsigned mask, T value, const char* file, int line, int argument,
                              int width = 32) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "a shuffle takes 2, 4 or 8 bytes");
  T result;
  kvemu_warp_at(KVEMU_SHFL, mask, &value, &result, (int)sizeof(T), source(kvemu_lane(), argument, width), file, line);
  return result;
}
static inline int kvemu_from_idx(int lane, int i, int width) { return (lane & ~(width - 1)) | (i & (width - 1)); }
static inline int kvemu_from_xor(int lane, int x, int width) {
  const int from = lane ^ x;
  return (from & ~(width - 1)) <= (lane & ~(width - 1)) ? from : lane;
}
static inline int kvemu_from_up(int lane, int d, int width) { return (lane & (width - 1)) < d ? lane : lane - d; }
static inline int kvemu_from_down(int lane, int d, int width) {
  return (lane & (width - 1)) + d >= width ? lane : lane + d;
}
#define __shfl_sync(m, v, ...) kvemu_shuffle(kvemu_from_idx, m, v, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(m, v, ...) kvemu_shuffle(kvemu_from_xor, m, v, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_up_sync(m, v, ...) kvemu_shuffle(kvemu_from_up, m, v, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(m, v, ...) kvemu_shuffle(kvemu_from_down, m, v, __FILE__, __LINE__, __VA_ARGS__)

static inline unsigned kvemu_ballot(unsigned mask, int value, const char* file, int line) {
  unsigned lanes;
  kvemu_warp_at(KVEMU_BALLOT, mask, &value, &lanes, 4, 0, file, line);
  return lanes;
}
#define __ballot_sync(m, p) kvemu_ballot(m, (p) ? 1 : 0, __FILE__, __LINE__)
#define __any_sync(m, p) (kvemu_ballot(m, (p) ? 1 : 0, __FILE__, __LINE__) != 0)
#define __all_sync(m, p) (kvemu_ballot(m, (p) ? 0 : 1, __FILE__, __LINE__) == 0)

template <class T>
static inline T kvemu_reduce(int how, unsigned mask, T value, const char* file, int line) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "__reduce_*_sync takes a 32-bit integer");
  T result;
  if (std::is_unsigned_v<T> && how == KVEMU_MIN) how = KVEMU_MIN_U;
  if (std::is_unsigned_v<T> && how == KVEMU_MAX) how = KVEMU_MAX_U;
  kvemu_warp_at(KVEMU_REDUCE, mask, &value, &result, 4, how, file, line);
  return result;
}
#define __reduce_add_sync(m, v) kvemu_reduce(KVEMU_ADD, m, v, __FILE__, __LINE__)
#define __reduce_min_sync(m, v) kvemu_reduce(KVEMU_MIN, m, v, __FILE__, __LINE__)
#define __reduce_max_sync(m, v) kvemu_reduce(KVEMU_MAX, m, v, __FILE__, __LINE__)
#define __reduce_and_sync(m, v) kvemu_reduce(KVEMU_AND, m, v, __FILE__, __LINE__)
#define __reduce_or_sync(m, v) kvemu_reduce(KVEMU_OR, m, v, __FILE__, __LINE__)
#define __reduce_xor_sync(m, v) kvemu_reduce(KVEMU_XOR, m, v, __FILE__, __LINE__)

// ldmatrix: lane 8 * i + r brings the address of row r of the 8x8 matrix i of 16-bit elements. The loads are made here,
// by the lane that gets the elements, for the sanitizers to see.
template <int N, bool TRANSPOSED>
static inline void kvemu_ldmatrix_at(unsigned (&out)[N], const void* row, const char* file, int line) {
  const int lane = kvemu_lane(), g = lane >> 2, t = lane & 3;
  if (reinterpret_cast<uintptr_t>(row) % 16) kvemu_trap_at("ldmatrix of a row that is not at 16 bytes", file, line);
  const uintptr_t mine = reinterpret_cast<uintptr_t>(row);
  for (int i = 0; i < N; i++) {
    uint16_t pair[2];
    for (int e = 0; e < 2; e++) {
      const int r = TRANSPOSED ? 2 * t + e : g, column = TRANSPOSED ? g : 2 * t + e;
      const auto from = kvemu_shuffle(kvemu_from_idx, 0xffffffffu, mine, file, line, 8 * i + r);
      pair[e] = reinterpret_cast<const uint16_t*>(from)[column];
    }
    out[i] = (unsigned)pair[0] | ((unsigned)pair[1] << 16);
  }
}
#define kvemu_ldmatrix(out, row) kvemu_ldmatrix_at<sizeof(out) / 4, false>(out, row, __FILE__, __LINE__)
#define kvemu_ldmatrix_trans(out, row) kvemu_ldmatrix_at<sizeof(out) / 4, true>(out, row, __FILE__, __LINE__)

// ---- cp.async -------------------------------------------------------------------------------------------------------
//
// The bytes may land at any time between the request and the wait for its group. In forward order they land at the wait
// (a read before it sees what was there), in reverse order at once (a refill of a stage still being read is seen), in
// random order either. The copying is done here, in instrumented code, for the sanitizers to see.

static inline void kvemu_cp_land(void* dst, const void* src, int size, int src_size) {
  for (int i = 0; i < size; i++)
    static_cast<unsigned char*>(dst)[i] = i < src_size ? static_cast<const unsigned char*>(src)[i] : 0;
}
static inline void kvemu_cp_async_at(void* dst, const void* src, int size, int src_size, const char* file, int line) {
  if (kvemu_cp_push(dst, src, size, src_size, file, line)) kvemu_cp_land(dst, src, size, src_size);
}
#define kvemu_cp_async(dst, src, size, src_size) kvemu_cp_async_at(dst, src, size, src_size, __FILE__, __LINE__)
static inline void kvemu_cp_wait(int keep_groups) {
  void* dst;
  const void* src;
  int size, src_size;
  while (kvemu_cp_pop(keep_groups, &dst, &src, &size, &src_size)) kvemu_cp_land(dst, src, size, src_size);
}

// ---- atomics and fences ---------------------------------------------------------------------------------------------
//
// Acquire-release stands in for the idiom of __threadfence() and a relaxed atomic, since TSan knows no bare fences.

template <class T, class F>
static inline T kvemu_atomic(T* p, F next) {
  using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned>;
  static_assert(sizeof(T) == sizeof(Bits), "an atomic takes 4 or 8 bytes");
  Bits* bits = reinterpret_cast<Bits*>(p);
  Bits old = __atomic_load_n(bits, __ATOMIC_ACQUIRE), wanted;
  T before, after;
  do {
    memcpy(&before, &old, sizeof(T));
    after = next(before);
    memcpy(&wanted, &after, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &old, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return before;
}
#define KVEMU_ATOMICS(T)                                                                                         \
  static inline T atomicAdd(T* p, T v) { return kvemu_atomic(p, [v](T old) { return static_cast<T>(old + v); }); }            \
  static inline T atomicMin(T* p, T v) { return kvemu_atomic(p, [v](T old) { return v < old ? v : old; }); }     \
  static inline T atomicMax(T* p, T v) { return kvemu_atomic(p, [v](T old) { return v > old ? v : old; }); }     \
  static inline T atomicAnd(T* p, T v) { return kvemu_atomic(p, [v](T old) { return static_cast<T>(old & v); }); }            \
  static inline T atomicOr(T* p, T v) { return kvemu_atomic(p, [v](T old) { return static_cast<T>(old | v); }); }             \
  static inline T atomicXor(T* p, T v) { return kvemu_atomic(p, [v](T old) { return static_cast<T>(old ^ v); }); }            \
  static inline T atomicExch(T* p, T v) { return kvemu_atomic(p, [v](T) { return v; }); }                        \
  static inline T atomicCAS(T* p, T is, T v) { return kvemu_atomic(p, [is, v](T old) { return old == is ? v : old; }); }
KVEMU_ATOMICS(int)
KVEMU_ATOMICS(unsigned)
KVEMU_ATOMICS(unsigned long long)
#undef KVEMU_ATOMICS
static inline int atomicSub(int* p, int v) { return atomicAdd(p, -v); }
static inline unsigned atomicSub(unsigned* p, unsigned v) { return atomicAdd(p, 0u - v); }
static inline float atomicAdd(float* p, float v) { return kvemu_atomic(p, [v](float old) { return old + v; }); }
static inline double atomicAdd(double* p, double v) { return kvemu_atomic(p, [v](double old) { return old + v; }); }
static inline float atomicExch(float* p, float v) { return kvemu_atomic(p, [v](float) { return v; }); }
static inline unsigned atomicInc(unsigned* p, unsigned last) {
  return kvemu_atomic(p, [last](unsigned old) { return old >= last ? 0u : old + 1u; });
}
static inline unsigned atomicDec(unsigned* p, unsigned last) {
  return kvemu_atomic(p, [last](unsigned old) { return old == 0 || old > last ? last : old - 1u; });
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// ---- intrinsics -----------------------------------------------------------------------------------------------------

template <class To, class From>
static inline To kvemu_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
static inline float __uint_as_float(unsigned v) { return kvemu_bits<float>(v); }
static inline unsigned __float_as_uint(float v) { return kvemu_bits<unsigned>(v); }
static inline int __float_as_int(float v) { return kvemu_bits<int>(v); }
static inline float __int_as_float(int v) { return kvemu_bits<float>(v); }
#define __expf(x) expf(x)  // glibc declares some of these names
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Never contracted into an FMA with a neighbour: the volatile keeps the rounding.
static inline float __fmul_rn(float a, float b) {
  volatile float r = a * b;
  return r;
}
static inline float __fadd_rn(float a, float b) {
  volatile float r = a + b;
  return r;
}
static inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
static inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }
static inline float rsqrtf(float a) { return 1.f / sqrtf(a); }
static inline int __float2int_rn(float a) { return (int)nearbyintf(a); }
static inline int __float2int_rz(float a) { return (int)a; }
static inline int __float2int_rd(float a) { return (int)floorf(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = ((unsigned long long)b << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = (selector >> (4 * i)) & 0xf;
    unsigned byte = (unsigned)(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = (byte & 0x80) ? 0xff : 0;  // prmt's sign replication
    result |= byte << (8 * i);
  }
  return result;
}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
#define KVEMU_MIN_MAX(T)                                      \
  static inline T min(T a, T b) { return b < a ? b : a; }     \
  static inline T max(T a, T b) { return a < b ? b : a; }
KVEMU_MIN_MAX(int)
KVEMU_MIN_MAX(unsigned)
KVEMU_MIN_MAX(long)
KVEMU_MIN_MAX(unsigned long)
KVEMU_MIN_MAX(long long)
KVEMU_MIN_MAX(unsigned long long)
#undef KVEMU_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }  // like the GPU's, these drop a NaN
static inline float max(float a, float b) { return fmaxf(a, b); }

// ---- kernels --------------------------------------------------------------------------------------------------------
//
// KVEMU_KERNEL(name) exports kvemu_launch_name and kvemu_signature_name. A signature is one word per parameter:
// `i4`, `u8`, `f4` for a scalar (kind, bytes); `P` for a pointer, then `r` or `w` (const or not), the kind of the
// pointee's elements, their bytes, and its alignment: `Prb2:2` points to const bf16, `Pwi4:16` to int4.

namespace kvemu {
template <class T> constexpr bool has_x = requires(T v) { v.x; };

template <class T>
constexpr char kind() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, __nv_bfloat16> || std::is_same_v<U, __nv_bfloat162>) return 'b';
  else if constexpr (std::is_same_v<U, __half> || std::is_same_v<U, __half2>) return 'h';
  else if constexpr (std::is_same_v<U, __nv_fp8_e4m3>) return 'e';
  else if constexpr (std::is_same_v<U, unsigned char> || std::is_same_v<U, uint4> || std::is_same_v<U, uint2>) return 'x';
  else if constexpr (std::is_floating_point_v<U>) return 'f';
  else if constexpr (std::is_integral_v<U>) return std::is_signed_v<U> ? 'i' : 'u';
  else return 'S';
}

template <class T>
void describe(char*& at) {
  if constexpr (std::is_pointer_v<T>) {
    using E = std::remove_pointer_t<T>;
    using U = std::remove_cv_t<E>;
    const char access = std::is_const_v<E> ? 'r' : 'w';
    if constexpr (std::is_void_v<U>) at += sprintf(at, "P%cx1:1 ", access);
    else if constexpr (kind<U>() != 'S') at += sprintf(at, "P%c%c%zu:%zu ", access, kind<U>(), sizeof(U), alignof(U));
    else if constexpr (has_x<U>) {  // a vector type: what its elements are
      using X = std::remove_cvref_t<decltype(U::x)>;
      at += sprintf(at, "P%c%c%zu:%zu ", access, kind<X>(), sizeof(X), alignof(U));
    } else at += sprintf(at, "P%cx%zu:%zu ", access, sizeof(U), alignof(U));
  } else {
    at += sprintf(at, "%c%zu ", kind<T>() == 'x' ? 'u' : kind<T>(), sizeof(T));
  }
}

template <class... A>
struct Kernel {
  struct Call {
    void (*function)(A...);
    void** arguments;
  };
  template <size_t... I>
  static void invoke(const Call& call, std::index_sequence<I...>) {
    call.function(*static_cast<std::remove_cv_t<A>*>(call.arguments[I])...);
  }
  static void entry(void* closure) { invoke(*static_cast<Call*>(closure), std::index_sequence_for<A...>{}); }
  static int launch(void (*function)(A...), const kvemu_launch* l, void** arguments, char* error, int size) {
    Call call{function, arguments};
    return kvemu_run(l, &entry, &call, error, size);
  }
  static void signature(char* at) {
    *at = 0;
    (describe<A>(at), ...);
  }
};
template <class... A> Kernel<A...> of(void (*)(A...));
}  // namespace kvemu

#define KVEMU_KERNEL(name)                                                                        \
  KVEMU_EXPORT int kvemu_launch_##name(const kvemu_launch* l, void** a, char* error, int size) {  \
    return decltype(kvemu::of(&name))::launch(&name, l, a, error, size);                          \
  }                                                                                               \
  KVEMU_EXPORT void kvemu_signature_##name(char* at) { decltype(kvemu::of(&name))::signature(at); }

#endif
