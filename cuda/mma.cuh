// Tensor cores as the attention kernels use them: m16n8k16 products, the transpose of an 8x8 matrix, packed pairs,
// e4m3 codes widened to halves, base-2 exponentials. Each piece of PTX has its C++ twin.
#pragma once
#include "common.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

// D (16x8) += A (16x16) * B (16x8) by one warp, fp32 accumulators; BF16 picks bf16 or fp16 operands.
// With quad = lane / 4 and part = lane % 4 a lane holds
//   a: {row quad, columns 2*part..+1}, {row quad+8, same}, {row quad, columns 2*part+8..+9}, {row quad+8, same}
//   b: {rows 2*part..+1, column quad}, {rows 2*part+8..+9, column quad}
//   d: {row quad, column 2*part}, {row quad, column 2*part+1}, {row quad+8, column 2*part}, {row quad+8, 2*part+1}
template <bool BF16> KV_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef KV_EMU
  struct {
    u32 a[4], b[2];
    float c[4];
  } in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  kvemu_warp(BF16 ? KVEMU_MMA_BF16 : KVEMU_MMA_F16, ALL_LANES, &in, d, sizeof(in), 0, 32, __LINE__);
#else
  if constexpr (BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Transpose of an 8x8 matrix of 16-bit elements held by a warp: before and after, a lane holds row lane / 4 and
// columns 2 * (lane % 4) and the next.
KV_DEVICE u32 transpose_8x8(u32 pair) {
#ifdef KV_EMU
  const int row = kvemu_lane() >> 2, part = kvemu_lane() & 3;  // of the result: row `row` was column `row`
  const u32 first = __shfl_sync(ALL_LANES, pair, 8 * part + row / 2);
  const u32 second = __shfl_sync(ALL_LANES, pair, 8 * part + 4 + row / 2);
  return __byte_perm(first, second, row & 1 ? 0x7632u : 0x5410u);
#else
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
#endif
}

// 2^x, subnormal results as zero.
KV_DEVICE float exp2_fast(float x) {
#ifdef KV_EMU
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Two floats, rounded to bf16 or fp16, the first in the low half.
template <bool BF16> KV_DEVICE u32 pack2(float low, float high) {
  if constexpr (BF16) return bits_as<u32>(__floats2bfloat162_rn(low, high));
  else return bits_as<u32>(__floats2half2_rn(low, high));
}
template <bool BF16> KV_DEVICE float2 unpack2(u32 pair) {
  if constexpr (BF16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  else return __half22float2(bits_as<__half2>(pair));
}

// Two e4m3 codes (the low 16 bits) to two halves without the instruction for it, which came with sm_89. A code's bits
// are those of the half 2^8 times smaller, one place to the right (its 7 exponents end where a half's 15 do): shift,
// then multiply, which is exact for subnormal codes too. 0x7f, the one NaN, gets all exponent bits set.
KV_DEVICE u32 widen_e4m3_by_shift(u32 codes) {
  const u32 bytes = __byte_perm(codes, 0, 0x1404);                       // each code in the high byte of a half
  const u32 magnitude = bytes & 0x7f007f00u;
  const u32 nan = (magnitude + 0x01000100u) & 0x80008000u;               // only 0x7f + 1 reaches the top bit
  const u32 halves = (bytes & 0x80008000u) | magnitude >> 1 | nan >> 1;
  const u32 factor = 0x5c005c00u;                                        // 256, twice
  return bits_as<u32>(__hmul2(bits_as<__half2>(halves), bits_as<__half2>(factor)));
}

KV_DEVICE u32 widen_e4m3(u32 codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return e4m3x2_to_half2(codes);
#else
  return widen_e4m3_by_shift(codes);
#endif
}
