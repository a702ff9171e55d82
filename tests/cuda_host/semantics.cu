// One kernel for each thing that the emulator promises, for test_emulator.py to hold against numpy.
#include "mma.cuh"

#define KERNEL extern "C" __global__ void

// out[how][lane] for idx, xor, up and down.
template <class T> KV_DEVICE void shuffles(T* out, const T* in, int by, int width) {
  const int lane = threadIdx.x;
  const T v = in[lane];
  out[lane] = __shfl_sync(0xffffffffu, v, by, width);
  out[32 + lane] = __shfl_xor_sync(0xffffffffu, v, by, width);
  out[64 + lane] = __shfl_up_sync(0xffffffffu, v, by, width);
  out[96 + lane] = __shfl_down_sync(0xffffffffu, v, by, width);
}
KERNEL shuffles_float(float* out, const float* in, int by, int width) { shuffles(out, in, by, width); }
KVEMU_KERNEL(shuffles_float)
KERNEL shuffles_i64(i64* out, const i64* in, int by, int width) { shuffles(out, in, by, width); }
KVEMU_KERNEL(shuffles_i64)
KERNEL shuffles_half(__half* out, const __half* in, int by, int width) { shuffles(out, in, by, width); }
KVEMU_KERNEL(shuffles_half)

// Each half of the warp by itself, in unlike numbers of rounds.
KERNEL half_warps(int* out, const int* in) {
  const int lane = threadIdx.x;
  const u32 mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  int v = in[lane];
  for (int i = 0; i < (lane < 16 ? 3 : 5); i++) v += __shfl_xor_sync(mask, v, 1 << i % 4);
  __syncwarp();
  out[lane] = v;
}
KVEMU_KERNEL(half_warps)

KERNEL votes(u32* out, const int* in) {
  const int lane = threadIdx.x;
  out[lane] = __ballot_sync(0xffffffffu, in[lane] > 0);
  out[32 + lane] = __any_sync(0xffffffffu, in[lane] > 100);
  out[64 + lane] = __all_sync(0xffffffffu, in[lane] > -100);
  out[96 + lane] = __reduce_add_sync(0xffffffffu, in[lane]);
  out[128 + lane] = __reduce_min_sync(0xffffffffu, in[lane]);
  out[160 + lane] = __reduce_max_sync(0xffffffffu, in[lane]);
  out[192 + lane] = __reduce_max_sync(0xffffffffu, (u32)in[lane]);
  out[224 + lane] = __reduce_xor_sync(0xffffffffu, (u32)in[lane]);
}
KVEMU_KERNEL(votes)

KERNEL block_votes(int* out, const int* in) {
  const int i = threadIdx.x, n = blockDim.x;
  out[i] = __syncthreads_count(in[i] > 0);
  out[n + i] = __syncthreads_or(in[i] > 100);
  out[2 * n + i] = __syncthreads_and(in[i] > -100);
}
KVEMU_KERNEL(block_votes)

KERNEL places(int* out) {
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int* to = out + (block * (int)(blockDim.x * blockDim.y * blockDim.z) + thread) * 6;
  to[0] = threadIdx.x, to[1] = threadIdx.y, to[2] = threadIdx.z;
  to[3] = blockIdx.x, to[4] = blockIdx.y, to[5] = blockIdx.z;
}
KVEMU_KERNEL(places)

// a [16][16], b [16][8] of 16-bit floats, c and out [16][8].
template <bool BF16> KV_DEVICE void product(float* out, const u16* a, const u16* b, const float* c) {
  const int quad = threadIdx.x / 4, part = threadIdx.x % 4;
  auto a_pair = [&](int row, int column) { return *reinterpret_cast<const u32*>(a + row * 16 + column); };
  auto b_pair = [&](int row) { return (u32)b[row * 8 + quad] | (u32)b[(row + 1) * 8 + quad] << 16; };
  const u32 fragment[4] = {a_pair(quad, 2 * part), a_pair(quad + 8, 2 * part), a_pair(quad, 2 * part + 8),
                           a_pair(quad + 8, 2 * part + 8)};
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = c[(quad + i / 2 * 8) * 8 + 2 * part + i % 2];
  mma_m16n8k16<BF16>(d, fragment, b_pair(2 * part), b_pair(2 * part + 8));
  for (int i = 0; i < 4; i++) out[(quad + i / 2 * 8) * 8 + 2 * part + i % 2] = d[i];
}
KERNEL product_bf16(float* out, const u16* a, const u16* b, const float* c) { product<true>(out, a, b, c); }
KVEMU_KERNEL(product_bf16)
KERNEL product_fp16(float* out, const u16* a, const u16* b, const float* c) { product<false>(out, a, b, c); }
KVEMU_KERNEL(product_fp16)

// Four 8x8 matrices through shared memory: out[matrix][lane][2], as they lie and transposed.
KERNEL matrices(u16* out, const u16* in) {
  KV_SMEM(u16, shared);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; i++) shared[lane * 8 + i] = in[lane * 8 + i];
  __syncwarp();
  u32 straight[4], transposed[4];
  kvemu_ldmatrix(straight, shared + lane * 8);
  kvemu_ldmatrix_trans(transposed, shared + lane * 8);
  for (int i = 0; i < 4; i++) {
    reinterpret_cast<u32*>(out)[i * 32 + lane] = straight[i];
    reinterpret_cast<u32*>(out)[128 + i * 32 + lane] = transposed[i];
  }
}
KVEMU_KERNEL(matrices)

// What is in the destination before the wait and after it; the source has 8 of 16 bytes.
KERNEL copies(u32* before, u32* after, const u32* in) {
  KV_SMEM(u32, shared);
  u32* mine = shared + threadIdx.x * 4;
  kvemu_cp_async(mine, in + threadIdx.x * 4, 16, 8);
  kvemu_cp_commit();
  for (int i = 0; i < 4; i++) before[threadIdx.x * 4 + i] = mine[i];
  kvemu_cp_wait(0);
  for (int i = 0; i < 4; i++) after[threadIdx.x * 4 + i] = mine[i];
}
KVEMU_KERNEL(copies)

KERNEL misaligned_copy(u32* out, const u32* in) {
  KV_SMEM(u32, shared);
  kvemu_cp_async(shared, in + 1, 16, 16);
  kvemu_cp_commit();
  kvemu_cp_wait(0);
  out[0] = shared[0];
}
KVEMU_KERNEL(misaligned_copy)

KERNEL atomics(int* out, float* sum, u32* counter) {
  const int i = threadIdx.x;
  atomicAdd(out + 0, i);
  atomicMax(out + 1, i);
  atomicMin(out + 2, -i);
  atomicOr(out + 3, 1 << i % 8);
  atomicSub(out + 4, 1);
  atomicCAS(out + 5, 0, 7);
  atomicAdd(sum, 0.5f);
  atomicInc(counter, 9u);
}
KVEMU_KERNEL(atomics)

KERNEL intrinsics(u32* out, const u32* in) {
  out[0] = __byte_perm(in[0], in[1], 0x7412u);
  out[1] = __byte_perm(in[0], in[1], 0x8eb0u);
  out[2] = __popc(in[0]), out[3] = __clz(in[1]), out[4] = __ffs(in[2]);
  out[5] = __umulhi(in[0], in[1]);
  out[6] = __float_as_uint(fmaxf(__uint_as_float(in[3]), 1.f));  // a NaN is dropped
  out[7] = __float_as_uint(max(__uint_as_float(in[3]), 2.f));
}
KVEMU_KERNEL(intrinsics)

// Every kind of parameter.
KERNEL parameters(float* f, const __nv_bfloat16* b, const __half* h, const u8* bytes, const int4* ints, i64* longs,
                  const float2* floats, int i, i64 l, float x, u32 u) {}
KVEMU_KERNEL(parameters)

// The same memory by two parameters, one const.
KERNEL both(const int* in, int* out, int n) {
  if ((int)threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x] + 1;
}
KVEMU_KERNEL(both)

KERNEL shared_bytes(int* out, int bytes) {
  KV_SMEM(u8, shared);
  u32 poisoned = 0;
  for (int i = 0; i < bytes; i++) poisoned += shared[i] == 0xff;
  out[blockIdx.x] = poisoned;
  for (int i = 0; i < bytes; i++) shared[i] = 0;
}
KVEMU_KERNEL(shared_bytes)

extern "C" __global__ void __launch_bounds__(2 * 32, 4) bounded(int* out) { out[threadIdx.x] = 1; }
KVEMU_KERNEL(bounded)
