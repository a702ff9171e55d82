// What all kernels share: element types and their conversions, 16-byte loads and stores, the check of block ids.
//
// Two kinds of compiler read these files: NVRTC for the GPU, and g++ or clang with -DKV_EMU, which runs the same
// kernels on the CPU (tests/cuda_host). PTX stands in small wrappers only, each with its C++ twin.
//
// Constants given by -D, where a kernel uses them:
//   KV_DTYPE       element of the cache: 0 float32, 1 float16, 2 bfloat16, 3 e4m3
//   KV_IO          element of new keys and values, queries and outputs: 0, 1 or 2 (default: KV_DTYPE, and 2 for e4m3)
//   KV_SCALE       scales of an e4m3 cache: 0 none, 1 per (token, kv head), 2 per kv head, 3 per (block, kv head)
//   KV_HEAD_DIM    elements of a head
//   KV_BLOCK_SIZE  tokens of a block
//   KV_CHECK_IDS   1: every block id and slot is checked on the device (id_ok below)
//
// Rules that keep a kernel runnable on the CPU: extern "C" names, KVEMU_KERNEL(name) after each kernel, shared memory only
// by KV_SMEM, no waiting for another block of threads.
#pragma once

#ifdef KV_EMU
#include "kvemu.h"
#define KV_SMEM(T, name) T* name = reinterpret_cast<T*>(kvemu_smem)
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define KVEMU_KERNEL(name)
#define KV_SMEM(T, name)                              \
  extern __shared__ __align__(128) unsigned char kv_shared_bytes[]; \
  T* name = reinterpret_cast<T*>(kv_shared_bytes)
#endif

#ifndef KV_DTYPE
#define KV_DTYPE 2
#endif
#ifndef KV_IO
#if KV_DTYPE == 3
#define KV_IO 2
#else
#define KV_IO KV_DTYPE
#endif
#endif
#ifndef KV_SCALE
#define KV_SCALE 0
#endif
#ifndef KV_CHECK_IDS
#define KV_CHECK_IDS 0
#endif

#define KV_DEVICE __device__ __forceinline__

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// ---- element types ------------------------------------------------------------------------------

struct e4m3_t {
  u8 bits;
};

// Lanes that share a row of `units` 16-byte units: the next power of two, at most a warp.
constexpr int lanes_for(int units) {
  int lanes = 1;
  while (lanes < units && lanes < 32) lanes *= 2;
  return lanes;
}

template <int DTYPE> struct element;
template <> struct element<0> { typedef float type; };
template <> struct element<1> { typedef __half type; };
template <> struct element<2> { typedef __nv_bfloat16 type; };
template <> struct element<3> { typedef e4m3_t type; };

typedef element<KV_DTYPE>::type kv_t;  // of the cache
typedef element<KV_IO>::type io_t;     // of keys, values and queries that come in, and of outputs

KV_DEVICE float to_float(float x) { return x; }
KV_DEVICE float to_float(__half x) { return __half2float(x); }
KV_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Nearest, ties to even.
template <class T> KV_DEVICE T from_float(float x);
template <> KV_DEVICE float from_float<float>(float x) { return x; }
template <> KV_DEVICE __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> KV_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// The bits of one type as another of the same size (a cast of the pointer would break C++'s aliasing rule).
template <class To, class From> KV_DEVICE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// 16 bytes in registers as 16 / sizeof(T) floats, and back.
template <class T> KV_DEVICE void unpack16(uint4 raw, float (&x)[16 / sizeof(T)]) {
  struct { T v[16 / sizeof(T)]; } e = bits_as<decltype(e)>(raw);
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(T)); i++) x[i] = to_float(e.v[i]);
}
template <class T> KV_DEVICE uint4 pack16(const float (&x)[16 / sizeof(T)]) {
  struct { T v[16 / sizeof(T)]; } e;
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(T)); i++) e.v[i] = from_float<T>(x[i]);
  return bits_as<uint4>(e);
}

// ---- e4m3 ---------------------------------------------------------------------------------------
// The formula is stated in backend.py (write_kv) and is the same on every backend, bit for bit:
//   scale = amax / 448 (1 where amax < 2^-100), code = nearest-even e4m3 of x * (1 / scale), saturating; NaN -> 0x7F.

constexpr float E4M3_MAX = 448.f;
constexpr float E4M3_TINY = 7.8886090522101181e-31f;  // 2^-100: below it a flush of subnormals could show

KV_DEVICE float e4m3_scale(float amax) { return amax >= E4M3_TINY ? amax / E4M3_MAX : 1.f; }

// Four floats, already divided by their scale, to four codes; the first in the low byte.
KV_DEVICE u32 to_e4m3x4(float a, float b, float c, float d) {
  const u32 low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const u32 high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Two codes (the low 16 bits) to two halves, packed as they were; exact.
KV_DEVICE u32 e4m3x2_to_half2(u32 codes) {
  const __half2_raw r = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes & 0xffffu), __NV_E4M3);
  return (u32)r.x | (u32)r.y << 16;
}

// Four codes to four floats; exact.
KV_DEVICE void from_e4m3x4(u32 codes, float (&x)[4]) {
  const float2 low = __half22float2(bits_as<__half2>(e4m3x2_to_half2(codes)));
  const float2 high = __half22float2(bits_as<__half2>(e4m3x2_to_half2(codes >> 16)));
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// Sixteen elements of a row (16 * sizeof(T) bytes, in registers): their largest magnitude, NaN left out ...
template <class T> KV_DEVICE float largest16(const uint4 (&raw)[sizeof(T)]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)); i++) {
    float x[16 / sizeof(T)];
    unpack16<T>(raw[i], x);
#pragma unroll
    for (int j = 0; j < int(16 / sizeof(T)); j++) most = fmaxf(most, fabsf(x[j]));
  }
  return most;
}

// ... their codes, 16 bytes of an e4m3 cache ...
template <class T> KV_DEVICE uint4 quantise16(const uint4 (&raw)[sizeof(T)], float inv) {
  float x[16];
#pragma unroll
  for (int i = 0; i < int(sizeof(T)); i++) {
    float part[16 / sizeof(T)];
    unpack16<T>(raw[i], part);
#pragma unroll
    for (int j = 0; j < int(16 / sizeof(T)); j++) x[i * (16 / sizeof(T)) + j] = part[j] * inv;
  }
  return make_uint4(to_e4m3x4(x[0], x[1], x[2], x[3]), to_e4m3x4(x[4], x[5], x[6], x[7]),
                    to_e4m3x4(x[8], x[9], x[10], x[11]), to_e4m3x4(x[12], x[13], x[14], x[15]));
}

// ... and the elements again.
template <class T> KV_DEVICE void dequantise16(uint4 codes, float scale, uint4 (&raw)[sizeof(T)]) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  float x[16];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float four[4];
    from_e4m3x4(words[i], four);
#pragma unroll
    for (int j = 0; j < 4; j++) x[4 * i + j] = four[j] * scale;
  }
#pragma unroll
  for (int i = 0; i < int(sizeof(T)); i++) {
    float part[16 / sizeof(T)];
#pragma unroll
    for (int j = 0; j < int(16 / sizeof(T)); j++) part[j] = x[i * (16 / sizeof(T)) + j];
    raw[i] = pack16<T>(part);
  }
}

// The largest of `lanes` neighbouring lanes (a power of two), in all of them; the whole warp takes part.
KV_DEVICE float max_of_lanes(float x, int lanes) {
#pragma unroll
  for (int apart = 16; apart > 0; apart >>= 1)
    if (apart < lanes) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
  return x;
}

// ---- loads and stores ---------------------------------------------------------------------------

// 16 bytes that this launch does not write and nobody reads again soon: read-only path, not kept in L1.
KV_DEVICE uint4 load16_once(const void* p) {
#ifdef KV_EMU
  return *reinterpret_cast<const uint4*>(p);
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// 16 bytes of memory that this launch writes too.
KV_DEVICE uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
KV_DEVICE void store16(void* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }
KV_DEVICE void store8(void* p, uint2 v) { *reinterpret_cast<uint2*>(p) = v; }

// 16 bytes that nobody reads soon: evicted first.
KV_DEVICE void store16_once(void* p, uint4 v) {
#ifdef KV_EMU
  *reinterpret_cast<uint4*>(p) = v;
#else
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

// ---- the check of ids ---------------------------------------------------------------------------

// Kernel codes of the error record; python/kvcatch/kernels/device_blocks.py names them in messages.
enum kernel_code {
  MOVE_BLOCKS = 1,
  ASSIGN_BLOCKS = 2,
  WRITE_KV = 3,
  QUANTISE_BLOCKS = 4,
  DEQUANTISE_BLOCKS = 5,
  DECODE_ATTENTION = 6,
  PREFILL_ATTENTION = 7,
};

// Whether id is within 0..bound-1. With KV_CHECK_IDS=1 a bad one is recorded in `errors`, int32[4]
// {kernel, index, id, bound} (zeroed before the first launch; the first bad id wins, the rest are dropped), and the
// caller must skip it: nothing may be read or written through it. Without the check it is always true and costs nothing.
KV_DEVICE bool id_ok(int* errors, kernel_code kernel, i64 index, i64 id, i64 bound) {
#if KV_CHECK_IDS
  if (id >= 0 && id < bound) return true;
  if (atomicCAS(errors, 0, (int)kernel) == 0) {
    const i64 most = 0x7fffffff;
    errors[1] = (int)(index < most ? index : most);
    errors[2] = (int)(id > most ? most : id < -most ? -most : id);
    errors[3] = (int)(bound < most ? bound : most);
  }
  return false;
#else
  return true;
#endif
}
