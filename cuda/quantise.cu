// Convert whole blocks between a float32, float16 or bfloat16 pool and an e4m3 pool, all layers in one launch.
//
// -D: KV_DTYPE=3, KV_IO (element of the other pool), KV_SCALE (1 per token and head, 2 per head, 3 per block and head),
// KV_HEAD_DIM (a multiple of 16), KV_BLOCK_SIZE, KV_CHECK_IDS.
//
// A tile is the block_size rows of one (block, layer, key or value, kv head): one run of bytes in both pools. One warp
// takes a tile. LANES neighbouring lanes share a row, 16 elements (16 bytes of codes) each; ROWS rows make a step, and
// AT_ONCE steps have their loads in flight together. The grid is persistent.
//
// The caller has seen to it that every dst differs and that the pools do not overlap.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNITS = KV_HEAD_DIM / 16;                // of a row, 16 elements each
constexpr int LANES = lanes_for(UNITS);
constexpr int PASSES = (UNITS + LANES - 1) / LANES;    // more than one for heads of over 512 elements
constexpr int ROWS = 32 / LANES;
constexpr int STEPS = (KV_BLOCK_SIZE + ROWS - 1) / ROWS;
constexpr int LOADS = sizeof(io_t);                    // 16-byte loads of 16 elements
constexpr int AT_ONCE = LOADS * PASSES >= 8 ? 1 : 8 / (LOADS * PASSES);
constexpr i64 CODE_ROW = KV_HEAD_DIM, IO_ROW = KV_HEAD_DIM * sizeof(io_t);
static_assert(KV_DTYPE == 3 && KV_IO != 3, "between an e4m3 pool and another");
static_assert(KV_HEAD_DIM % 16 == 0, "a head is a multiple of 16 bytes");
static_assert(KV_SCALE >= 1 && KV_SCALE <= 3, "e4m3 has scales");


// Which tile an item is.
struct Tile {
  u32 head, kv, layer, move;
};

KV_DEVICE Tile tile_of(u32 item, u32 layers, u32 heads) {
  Tile t;
  t.head = item % heads, item /= heads;
  t.kv = item % 2, item /= 2;
  t.layer = item % layers, t.move = item / layers;
  return t;
}

// One row's share of a lane: its 16 elements, `p` for the parts of a row beyond 32 lanes.
typedef uint4 Share[PASSES][LOADS];

KV_DEVICE void load_share(Share& raw, const char* tile, int row, int lane) {
#pragma unroll
  for (int p = 0; p < PASSES; p++)
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int unit = p * LANES + lane;
      raw[p][i] = make_uint4(0, 0, 0, 0);
      if (row < KV_BLOCK_SIZE && unit < UNITS) raw[p][i] = load16(tile + row * IO_ROW + (unit * LOADS + i) * 16);
    }
}

KV_DEVICE float largest_of_share(const Share& raw) {
  float most = 0.f;
#pragma unroll
  for (int p = 0; p < PASSES; p++) most = fmaxf(most, largest16<io_t>(raw[p]));
  return most;
}

KV_DEVICE void store_codes(const Share& raw, char* tile, int row, int lane, float inv) {
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int unit = p * LANES + lane;
    const uint4 codes = quantise16<io_t>(raw[p], inv);
    if (row < KV_BLOCK_SIZE && unit < UNITS) store16(tile + row * CODE_ROW + unit * 16, codes);
  }
}

// moves: (src, dst). scale_offset: from an area of the e4m3 pool to its scales. head_scales: [layers][2][heads] (KV_SCALE 2).
extern "C" __global__ void __launch_bounds__(THREADS, UNITS == LANES ? 3 : 2)
quantise_blocks(const char* source, char* pool, const int2* moves, u32 num_moves, u32 layers, u32 heads,
                i64 source_block, i64 source_layer, i64 source_kv, i64 pool_block, i64 pool_layer, i64 pool_kv,
                i64 scale_offset, const float* head_scales, int source_blocks, int pool_blocks, int* errors) {
  const u32 items = num_moves * layers * 2 * heads;
  const u32 warps = gridDim.x * (THREADS / 32);
  const int lane = threadIdx.x % LANES, first_row = threadIdx.x % 32 / LANES;
  for (u32 item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; item < items; item += warps) {
    const Tile t = tile_of(item, layers, heads);
    const int2 ids = moves[t.move];
    if (!id_ok(errors, QUANTISE_BLOCKS, t.move, ids.x, source_blocks)) continue;
    if (!id_ok(errors, QUANTISE_BLOCKS, t.move, ids.y, pool_blocks)) continue;
    const char* from = source + ids.x * source_block + t.layer * source_layer + t.kv * source_kv + t.head * KV_BLOCK_SIZE * IO_ROW;
    char* area = pool + ids.y * pool_block + t.layer * pool_layer + t.kv * pool_kv;
    char* to = area + t.head * KV_BLOCK_SIZE * CODE_ROW;
    float* scales = reinterpret_cast<float*>(area + scale_offset);
    Share raw[AT_ONCE];
    float inv = 1.f;
#if KV_SCALE == 2
    inv = 1.f / head_scales[(t.layer * 2 + t.kv) * heads + t.head];
#elif KV_SCALE == 3
    // The scale needs the whole tile. A short one stays in registers; a long one is read again, from the L1 cache.
    float most = 0.f;
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AT_ONCE) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) load_share(raw[j], from, (step + j) * ROWS + first_row, lane);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) most = fmaxf(most, largest_of_share(raw[j]));
    }
    const float scale = e4m3_scale(max_of_lanes(most, 32));
    inv = 1.f / scale;
    if (threadIdx.x % 32 == 0) scales[t.head] = scale;
#endif
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AT_ONCE) {
      if (KV_SCALE != 3 || STEPS > AT_ONCE) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) load_share(raw[j], from, (step + j) * ROWS + first_row, lane);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int row = (step + j) * ROWS + first_row;
#if KV_SCALE == 1
        const float scale = e4m3_scale(max_of_lanes(largest_of_share(raw[j]), LANES));
        inv = 1.f / scale;
        if (row < KV_BLOCK_SIZE && lane == 0) scales[t.head * KV_BLOCK_SIZE + row] = scale;
#endif
        store_codes(raw[j], to, row, lane, inv);
      }
    }
  }
}
KVEMU_KERNEL(quantise_blocks)

// The way back; arguments as above, `source` the e4m3 pool and `target` the other.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
dequantise_blocks(const char* source, char* target, const int2* moves, u32 num_moves, u32 layers,
                  u32 heads, i64 source_block, i64 source_layer, i64 source_kv, i64 target_block, i64 target_layer,
                  i64 target_kv, i64 scale_offset, const float* head_scales, int source_blocks, int target_blocks,
                  int* errors) {
  const u32 items = num_moves * layers * 2 * heads;
  const u32 warps = gridDim.x * (THREADS / 32);
  const int lane = threadIdx.x % LANES, first_row = threadIdx.x % 32 / LANES;
  for (u32 item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; item < items; item += warps) {
    const Tile t = tile_of(item, layers, heads);
    const int2 ids = moves[t.move];
    if (!id_ok(errors, DEQUANTISE_BLOCKS, t.move, ids.x, source_blocks)) continue;
    if (!id_ok(errors, DEQUANTISE_BLOCKS, t.move, ids.y, target_blocks)) continue;
    const char* area = source + ids.x * source_block + t.layer * source_layer + t.kv * source_kv;
    const char* from = area + t.head * KV_BLOCK_SIZE * CODE_ROW;
    const float* scales = reinterpret_cast<const float*>(area + scale_offset);
    char* to = target + ids.y * target_block + t.layer * target_layer + t.kv * target_kv + t.head * KV_BLOCK_SIZE * IO_ROW;
    float scale = 1.f;
#if KV_SCALE == 2
    scale = head_scales[(t.layer * 2 + t.kv) * heads + t.head];
#elif KV_SCALE == 3
    scale = scales[t.head];
#endif
#pragma unroll 2
    for (int step = 0; step < STEPS; step++) {
      const int row = step * ROWS + first_row;
      if (row >= KV_BLOCK_SIZE) break;
#if KV_SCALE == 1
      scale = scales[t.head * KV_BLOCK_SIZE + row];
#endif
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const int unit = p * LANES + lane;
        if (unit >= UNITS) continue;
        uint4 raw[LOADS];
        dequantise16<io_t>(load16_once(from + row * CODE_ROW + unit * 16), scale, raw);
#pragma unroll
        for (int i = 0; i < LOADS; i++) store16(to + row * IO_ROW + (unit * LOADS + i) * 16, raw[i]);
      }
    }
  }
}
KVEMU_KERNEL(dequantise_blocks)
