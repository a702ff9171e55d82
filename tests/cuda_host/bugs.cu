// Planted bugs, one per kernel, and correct kernels beside them: planted.py says which check finds which, and that the
// correct ones pass every check.
#include "common.cuh"

#define KERNEL extern "C" __global__ void

// ---- shared memory and barriers -----------------------------------------------------------------

template <bool BARRIER> KV_DEVICE void neighbours(float* out, const float* in, int n) {
  KV_SMEM(float, shared);
  const int i = threadIdx.x;
  shared[i] = in[i];
  if (BARRIER) __syncthreads();
  out[i] = shared[(i + 1) % n];
}
KERNEL ok_neighbours(float* out, const float* in, int n) { neighbours<true>(out, in, n); }
KVEMU_KERNEL(ok_neighbours)
KERNEL missing_syncthreads(float* out, const float* in, int n) { neighbours<false>(out, in, n); }
KVEMU_KERNEL(missing_syncthreads)

// Sums 32 numbers in shared memory by one warp.
template <bool SYNCWARP> KV_DEVICE void warp_tree(float* out, const float* in) {
  KV_SMEM(float, shared);
  const int i = threadIdx.x;
  shared[i] = in[i];
  for (int apart = 16; apart > 0; apart >>= 1) {
    if (SYNCWARP) __syncwarp();
    if (i < apart) shared[i] += shared[i + apart];
  }
  if (i == 0) out[0] = shared[0];
}
KERNEL ok_warp_tree(float* out, const float* in, int n) { warp_tree<true>(out, in); }
KVEMU_KERNEL(ok_warp_tree)
KERNEL missing_syncwarp(float* out, const float* in, int n) { warp_tree<false>(out, in); }
KVEMU_KERNEL(missing_syncwarp)

KERNEL shared_beyond(float* out, const float* in, int n) {  // one element more than asked for
  KV_SMEM(float, shared);
  const int i = threadIdx.x;
  shared[i + 1] = in[i];
  __syncthreads();
  out[i] = shared[i + 1];
}
KVEMU_KERNEL(shared_beyond)

KERNEL shared_before(float* out, const float* in, int n) {
  KV_SMEM(float, shared);
  const int i = threadIdx.x;
  shared[i - 1] = in[i];
  __syncthreads();
  out[i] = i < n - 1 ? shared[i] : 0.f;
}
KVEMU_KERNEL(shared_before)

KERNEL shared_unwritten(float* out, const float* in, int n) {
  KV_SMEM(float, shared);
  out[threadIdx.x] = in[threadIdx.x] + shared[threadIdx.x] * 0.f;
}
KVEMU_KERNEL(shared_unwritten)

KERNEL shared_of_last_block(float* out, const float* in, int n) {  // every block but the first leaves it to its forerunner
  KV_SMEM(float, shared);
  const int i = threadIdx.x;
  if (blockIdx.x == 0) shared[i] = in[i];
  out[blockIdx.x * blockDim.x + i] = shared[i];
}
KVEMU_KERNEL(shared_of_last_block)

KERNEL divergent_barrier(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  if (i < 16) __syncthreads();
  out[i] = in[i];
}
KVEMU_KERNEL(divergent_barrier)

KERNEL two_barriers(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  if (i < 16) __syncthreads();
  else
    __syncthreads();
  out[i] = in[i];
}
KVEMU_KERNEL(two_barriers)

// ---- warp collectives ---------------------------------------------------------------------------

KERNEL divergent_shuffle(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  float v = in[i];
  if (i < 20) v = __shfl_xor_sync(0xffffffffu, v, 1);
  out[i] = v;
}
KVEMU_KERNEL(divergent_shuffle)

KERNEL shuffle_from_outside(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  float v = in[i];
  if (i < 16) v = __shfl_xor_sync(0x0000ffffu, v, 16);
  out[i] = v;
}
KVEMU_KERNEL(shuffle_from_outside)

KERNEL not_in_own_mask(float* out, const float* in, int n) {
  out[threadIdx.x] = __shfl_sync(0x0000ffffu, in[threadIdx.x], 0);
}
KVEMU_KERNEL(not_in_own_mask)

KERNEL ballot_of_half_warp(float* out, const float* in, int n) {  // launched with 16 threads
  out[threadIdx.x] = (float)__popc(__ballot_sync(0xffffffffu, in[threadIdx.x] > 0.f));
}
KVEMU_KERNEL(ballot_of_half_warp)

// ---- global memory ------------------------------------------------------------------------------

KERNEL load_beyond(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i + 1];
}
KVEMU_KERNEL(load_beyond)

KERNEL store_beyond(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) out[i] = in[i < n ? i : 0];
}
KVEMU_KERNEL(store_beyond)

KERNEL store_before(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  out[i - 1] = in[i];
}
KVEMU_KERNEL(store_before)

KERNEL wild_id(float* out, const float* in, int n) {  // what a stale block table holds
  out[threadIdx.x] = in[(i64)1000000 * n + threadIdx.x];
}
KVEMU_KERNEL(wild_id)

KERNEL null_pointer(float* out, const float* in, int n) {
  const float* from = n < 0 ? in : nullptr;
  out[threadIdx.x] = from[threadIdx.x];
}
KVEMU_KERNEL(null_pointer)

KERNEL store_through_const(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  const_cast<float*>(in)[i] = 0.f;
  out[i] = in[i];
}
KVEMU_KERNEL(store_through_const)

KERNEL misaligned_load(float* out, const float* in, int n) {  // 16 bytes at a multiple of 4
  const int i = threadIdx.x;
  if (i < n / 4 - 1) {
    const float4 v = *reinterpret_cast<const float4*>(in + 1 + 4 * i);
    out[i] = v.x;
  }
}
KVEMU_KERNEL(misaligned_load)

KERNEL missing_tail(float* out, const float* in, int n) {  // whole rounds only
  for (int i = threadIdx.x; i + (int)blockDim.x <= n; i += blockDim.x) out[i] = in[i];
}
KVEMU_KERNEL(missing_tail)

// ---- between blocks -----------------------------------------------------------------------------

KERNEL block_race(float* out, const float* in, int n) {
  const int i = blockIdx.x;
  if (threadIdx.x == 0) out[i] = out[(i + 1) % gridDim.x] + 1.f;
}
KVEMU_KERNEL(block_race)

KERNEL float_atomics(float* out, const float* in, int n) {  // a sum in no order
  atomicAdd(out, in[blockIdx.x * blockDim.x + threadIdx.x]);
}
KVEMU_KERNEL(float_atomics)

template <bool FENCE> KV_DEVICE void last_block(float* out, const float* in, float* parts, u32* done) {
  if (threadIdx.x) return;
  float sum = 0.f;
  for (int i = 0; i < (int)blockDim.x; i++) sum += in[blockIdx.x * blockDim.x + i];
  parts[blockIdx.x] = sum;
  __threadfence();
  bool last;
  if (FENCE) last = atomicAdd(done, 1u) == gridDim.x - 1;
  else last = (*done)++ == gridDim.x - 1;
  if (!last) return;
  __threadfence();
  sum = 0.f;
  for (int i = 0; i < (int)gridDim.x; i++) sum += parts[i];
  out[0] = sum;
}
KERNEL ok_last_block(float* out, const float* in, int n, float* parts, u32* done) {
  last_block<true>(out, in, parts, done);
}
KVEMU_KERNEL(ok_last_block)
KERNEL plain_counter(float* out, const float* in, int n, float* parts, u32* done) {
  last_block<false>(out, in, parts, done);
}
KVEMU_KERNEL(plain_counter)

// ---- cp.async -----------------------------------------------------------------------------------

// Every thread reads the column of its neighbour through a ring of three stages.
enum ring_bug { NO_BUG, WEAK_WAIT, EARLY_REFILL };
template <ring_bug BUG> KV_DEVICE void ring(float* out, const float* in, int n) {
  KV_SMEM(float4, stages);
  const int threads = blockDim.x, mine = threadIdx.x, neighbour = (mine + 1) % threads, rounds = n / (4 * threads);
  auto fetch = [&](int round) {
    if (round < rounds) kvemu_cp_async(stages + round % 3 * threads + mine, in + (round * threads + mine) * 4, 16, 16);
    kvemu_cp_commit();
  };
  // After the barrier of a round nobody reads the stage of the round before; its own is read by everybody.
  constexpr int ahead = BUG == EARLY_REFILL ? 3 : 2;
  for (int round = 0; round < ahead; round++) fetch(round);
  for (int round = 0; round < rounds; round++) {
    kvemu_cp_wait(BUG == WEAK_WAIT ? ahead : ahead - 1);
    __syncthreads();
    fetch(round + ahead);
    reinterpret_cast<float4*>(out)[round * threads + neighbour] = stages[round % 3 * threads + neighbour];
  }
}
KERNEL ok_ring(float* out, const float* in, int n) { ring<NO_BUG>(out, in, n); }
KVEMU_KERNEL(ok_ring)
KERNEL weak_wait(float* out, const float* in, int n) { ring<WEAK_WAIT>(out, in, n); }
KVEMU_KERNEL(weak_wait)
KERNEL early_refill(float* out, const float* in, int n) { ring<EARLY_REFILL>(out, in, n); }
KVEMU_KERNEL(early_refill)

// ---- arithmetic ---------------------------------------------------------------------------------

KERNEL local_beyond(float* out, const float* in, int n) {
  float local[4];
  for (int i = 0; i < 4; i++) local[i] = in[i];
  out[threadIdx.x] = local[threadIdx.x % 8];
}
KVEMU_KERNEL(local_beyond)

KERNEL wide_shift(float* out, const float* in, int n) { out[threadIdx.x] = (float)(1 << (threadIdx.x + n)); }
KVEMU_KERNEL(wide_shift)

KERNEL int_overflow(float* out, const float* in, int n) {  // an offset that needs 64 bits
  const int block_stride = 1 << 20;
  out[threadIdx.x] = (float)((int)(threadIdx.x + 4096) * block_stride);
}
KVEMU_KERNEL(int_overflow)

KERNEL divide_by_zero(float* out, const float* in, int n) { out[threadIdx.x] = (float)(n / (int)(threadIdx.x)); }
KVEMU_KERNEL(divide_by_zero)

KERNEL uninitialised(float* out, const float* in, int n) {
  float pair[2];
  pair[threadIdx.x % 2] = in[threadIdx.x];
  out[threadIdx.x] = pair[0];
}
KVEMU_KERNEL(uninitialised)

// ---- control ------------------------------------------------------------------------------------

KERNEL hang(float* out, const float* in, int n) {  // waits for a block that runs after it
  volatile float* flag = out;
  if (blockIdx.x) flag[0] = 1.f;
  else
    while (flag[0] != 1.f) {
    }
}
KVEMU_KERNEL(hang)

KERNEL stack_overflow(float* out, const float* in, int n) {
  volatile float big[1 << 16];
  for (int i = 0; i < 1 << 16; i++) big[i] = in[0];
  out[threadIdx.x] = big[threadIdx.x];
}
KVEMU_KERNEL(stack_overflow)

KERNEL trap(float* out, const float* in, int n) {
  if (threadIdx.x == 3) __trap();
  out[threadIdx.x] = in[threadIdx.x];
}
KVEMU_KERNEL(trap)

extern "C" __global__ void __launch_bounds__(64) ok_bounded(float* out, const float* in, int n) {
  out[threadIdx.x] = in[threadIdx.x];
}
KVEMU_KERNEL(ok_bounded)
