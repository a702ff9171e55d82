// Any simultaneous assignment of blocks, new[dst] = old[src] for all pairs at once (chains, cycles, one src to many
// dst), in one launch with no scratch block and no synchronisation.
//
// Why it is safe: a copy of a block touches byte o of src and byte o of dst only. One thread does byte o (16 of them) of
// every copy of a group, in an order that reads each block before it is overwritten; no other thread writes a byte that
// it touches (groups share no block but those that are only read). A cycle needs one temporary per byte: a register.
//
// ops[first[g] .. first[g + 1]) is group g in that order (order_moves in the Rust core); id -1 names the register.
// Every op reads what its source held before the launch, so the next op's loads may be issued before this op's stores:
// two ops are in flight a thread.
//
// Runs, strides and the persistent grid are those of block_move.cu. One warp takes CHUNK bytes of one run of a group.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = 4;                   // 16-byte columns a thread carries through a group
constexpr int CHUNK = 32 * 16 * COLUMNS;
constexpr int LEFT_OUT = -2;

// ops: (dst, src). chunks: of a run, rounded up.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
assign_blocks(char* pool, const int2* ops, const int* first, u32 groups, u32 regions, u32 chunks,
              i64 region_bytes, i64 block_stride, i64 region_stride, int num_blocks, int* errors) {
  const u32 items = groups * regions * chunks;
  const u32 warps = gridDim.x * (THREADS / 32);
  for (u32 item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; item < items; item += warps) {
    const u32 chunk = item % chunks, run = item / chunks;
    const u32 region = run % regions, group = run / regions;
    const i64 offset = (i64)chunk * CHUNK + threadIdx.x % 32 * 16;
    const i64 left = region_bytes - offset;  // column k exists while k * 512 < left
    char* base = pool + region * region_stride + offset;
    uint4 held[COLUMNS], now[COLUMNS], next[COLUMNS];
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) held[k] = now[k] = next[k] = make_uint4(0, 0, 0, 0);

    int i = first[group];
    const int end = first[group + 1];
    // -1 is the register. With the check an op with a bad id is left out, and so is one that would copy a register
    // which a bad id left empty.
    bool filled = true;
    auto checked = [&](int at) {
      int2 op = ops[at];
#if KV_CHECK_IDS
      bool good = op.x == -1 || id_ok(errors, ASSIGN_BLOCKS, at, op.x, num_blocks);
      good = (op.y == -1 ? filled : id_ok(errors, ASSIGN_BLOCKS, at, op.y, num_blocks)) && good;
      if (op.x == -1) filled = good;
      if (!good) op = make_int2(LEFT_OUT, LEFT_OUT);
#endif
      return op;
    };
    auto load = [&](uint4(&v)[COLUMNS], int src) {
      if (src < 0) return;
      const char* from = base + src * block_stride;
#pragma unroll
      for (int k = 0; k < COLUMNS; k++)
        if (k * 512 < left) v[k] = load16(from + k * 512);
    };
    if (i >= end) continue;
    int2 op = checked(i);
    load(now, op.y);
    for (;;) {
      int2 following = make_int2(LEFT_OUT, LEFT_OUT);
      if (++i < end) {
        following = checked(i);
        load(next, following.y);
      }
      if (op.y == -1) {
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) now[k] = held[k];
      }
      if (op.x == -1) {
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) held[k] = now[k];
      } else if (op.x >= 0) {
        char* to = base + op.x * block_stride;
#pragma unroll
        for (int k = 0; k < COLUMNS; k++)
          if (k * 512 < left) store16(to + k * 512, now[k]);
      }
      if (i >= end) break;
      op = following;
#pragma unroll
      for (int k = 0; k < COLUMNS; k++) now[k] = next[k];
    }
  }
}
KVEMU_KERNEL(assign_blocks)
