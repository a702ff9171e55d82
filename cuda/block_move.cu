// Copy whole KV blocks, all layers in one launch: compaction and copy-on-write within a pool, gather to and scatter
// from a staging pool, and copies between a pool and pinned host memory that the device may address.
//
// A block is `regions` runs of `region_bytes`; run r of block b starts at pool + b * block_stride + r * region_stride.
// Two block-major pools: one run. Otherwise one run per layer, each pool with its own strides.
//
// The caller has seen to it that every dst differs and that no dst is a src. No two threads then touch a byte that one
// of them writes, and the loads may take the read-only path.
//
// One warp takes CHUNK bytes of one run at a time, all its loads in flight at once. The grid is persistent: any number
// of thread blocks gives the same result.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 8;                     // 16-byte loads in flight a thread
constexpr int CHUNK = 32 * 16 * LOADS;       // bytes a warp copies at a time

// moves: (src, dst). chunks: of a run, rounded up.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
move_blocks(const char* source, char* target, const int2* moves, u32 num_moves, u32 regions, u32 chunks,
            i64 region_bytes, i64 source_block, i64 source_region,
            i64 target_block, i64 target_region, int source_blocks, int target_blocks, int* errors) {
  // 32 bits: a 64-bit division is a subroutine. The host has checked that the product fits.
  const u32 items = num_moves * regions * chunks;
  const u32 warps = gridDim.x * (THREADS / 32);
  const u32 lane_offset = threadIdx.x % 32 * 16;
  for (u32 item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; item < items; item += warps) {
    const u32 chunk = item % chunks, run = item / chunks;
    const u32 region = run % regions, move = run / regions;
    const int2 ids = moves[move];
    if (!id_ok(errors, MOVE_BLOCKS, move, ids.x, source_blocks)) continue;
    if (!id_ok(errors, MOVE_BLOCKS, move, ids.y, target_blocks)) continue;
    const i64 offset = (i64)chunk * CHUNK + lane_offset;
    const i64 left = region_bytes - offset;  // this lane's load k exists while k * 512 < left
    const char* from = source + ids.x * source_block + region * source_region + offset;
    char* to = target + ids.y * target_block + region * target_region + offset;
    uint4 v[LOADS];
    if ((i64)(chunk + 1) * CHUNK <= region_bytes) {
#pragma unroll
      for (int k = 0; k < LOADS; k++) v[k] = load16_once(from + k * 512);
#pragma unroll
      for (int k = 0; k < LOADS; k++) store16_once(to + k * 512, v[k]);
    } else {
#pragma unroll
      for (int k = 0; k < LOADS; k++)
        if (k * 512 < left) v[k] = load16_once(from + k * 512);
#pragma unroll
      for (int k = 0; k < LOADS; k++)
        if (k * 512 < left) store16_once(to + k * 512, v[k]);
    }
  }
}
KVEMU_KERNEL(move_blocks)
