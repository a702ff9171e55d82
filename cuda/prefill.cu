// Paged causal attention of the last tokens of each sequence over its blocks: a chunk of a prompt over its prefix.
//
// Rows are (query token, head of the group) pairs, token outermost: row r of a sequence is token r / KV_GROUP. Grid (tiles
// of 64 rows, kv heads), 128 threads: a warp takes 16 rows. Keys and values pass through shared memory in two stages of
// STAGE tokens, the next one copied while one is read. Constants by -D besides those of attention.cuh:
//   KV_WINDOW     1: a query sees the last `window` tokens only, itself included
//   KV_MIN_CTAS   blocks of threads per multiprocessor that registers must leave room for
#include "attention.cuh"

#ifndef KV_WINDOW
#define KV_WINDOW 0
#endif
#ifndef KV_MIN_CTAS
#define KV_MIN_CTAS 2
#endif

constexpr int TILES = 2, WARP_ROWS = 8 * TILES, CTA_ROWS = WARPS * WARP_ROWS;

// Bytes between tokens in shared memory, so that the lanes served together find unlike banks: for keys two tokens at
// 4 * 16 bytes each, for values four even tokens at 2 * 16.
constexpr int TOKEN_BYTES = HEAD_DIM * ITEM;
constexpr int K_PITCH = (TOKEN_BYTES + 63) / 128 * 128 + 64;
constexpr int V_PITCH = (TOKEN_BYTES + 15) / 32 * 32 + 16;
constexpr int FIT = 24 * 1024 / (K_PITCH + V_PITCH + 8) / STEP * STEP;
constexpr int STAGE = FIT < 64 ? FIT : 64;  // tokens
constexpr int STAGE_BYTES = STAGE * (K_PITCH + V_PITCH + 8);
constexpr bool Q_SHARED = HEAD_DIM == 256;  // 16 rows of 256 elements, twice, do not fit a warp's registers

// sequences[s]: {first row of `query`, its rows, tokens in the cache, 0}; tiles[i]: {sequence, first row of the 64}.
// Strides as in decode.cu. Shared memory: 2 * STAGE_BYTES, and with Q_SHARED the
// queries, 64 * HEAD_DIM of 2 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, KV_MIN_CTAS)
prefill_attention(io_t* out, const io_t* query, i64 query_row, i64 query_head, const u8* cache, i64 layer,
                  i64 block_stride, i64 kv_stride, i64 head_stride, i64 scale_offset, i64 scale_head,
                  const float* head_scales, const int* tables, i64 table_row, const float* slopes,
                  const int4* sequences, const int2* tiles, int kv_heads, int num_blocks, float scale, float cap,
                  int window, int* errors) {
  KV_SMEM(u8, shared);
  const int2 tile = tiles[blockIdx.x];
  const int4 sequence = sequences[tile.x];
  const int kv_head = blockIdx.y, num_rows = sequence.y * GROUP, prefix = sequence.z - sequence.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
  const int* table = tables + tile.x * table_row;
  const u8* base = cache + layer + kv_head * head_stride;
  const u8* scale_base = cache + layer + scale_offset + kv_head * scale_head;

  const int first_row = tile.y + warp * WARP_ROWS;  // of this warp
  Rows<TILES, Q_SHARED> rows;
  if (Q_SHARED)
    rows.q_shared = reinterpret_cast<uint2*>(shared + 2 * STAGE_BYTES) + warp * (TILES * K_SHARE / 4 * 32) + lane;
  start(rows);
  const io_t* row[TILES];
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const int r = first_row + 8 * n + quad;
    row[n] = nullptr;
    if (r < num_rows)
      row[n] = query + (sequence.x + r / GROUP) * query_row + (kv_head * GROUP + r % GROUP) * query_head;
  }
  float factor = logit_factor(scale, cap);
#if KV_SCALE == 2
  factor *= head_scales[kv_head];
#endif
  load_query(rows, row, factor, lane);
  int position[TILES][2];  // of the queries of the lane's rows
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int r = first_row + 8 * n + 2 * part + c;
      position[n][c] = prefix + r / GROUP;
#if KV_ALIBI
      if (r < num_rows) rows.slope[n][c] = slopes[kv_head * GROUP + r % GROUP] * LOG2E;
#endif
    }

  // What the block of threads and this warp need of the keys.
  const int last = prefix + (min(tile.y + CTA_ROWS, num_rows) - 1) / GROUP;
  const int warp_low = prefix + first_row / GROUP;
  const int warp_high = prefix + (min(first_row + WARP_ROWS, num_rows) - 1) / GROUP;
  const int end = last + 1, warp_end = first_row < num_rows ? warp_high + 1 : 0;
#if KV_WINDOW
  const int begin = max(0, prefix + tile.y / GROUP - window + 1), warp_begin = max(0, warp_low - window + 1);
#else
  const int begin = 0, warp_begin = 0;
#endif

  auto copy_stage = [&](int at, u8* stage) {
    constexpr int pieces = TOKEN_BYTES / 16;
#pragma unroll 2
    for (int i = threadIdx.x; i < STAGE * pieces; i += THREADS) {
      const int token = i / pieces, piece = i % pieces * 16, t = at + token;
      bool live = t >= begin && t < end;  // zeros elsewhere: 0 * NaN is NaN
      const int id = live ? table[t / BLOCK_SIZE] : 0;
      live = live && id_ok(errors, PREFILL_ATTENTION, tile.x, id, num_blocks);
      const u8* from = live ? base + id * block_stride + t % BLOCK_SIZE * TOKEN_BYTES + piece : base;
      copy16_async(stage + token * K_PITCH + piece, from, live);
      copy16_async(stage + STAGE * K_PITCH + token * V_PITCH + piece, from + kv_stride, live);
    }
    if constexpr (AREA_SCALES) {
      u8* scales = stage + STAGE * (K_PITCH + V_PITCH);
      for (int i = threadIdx.x; i < 2 * STAGE; i += THREADS) {
        const int token = i % STAGE, t = at + token;
        bool live = t >= begin && t < end;
        const int id = live ? table[t / BLOCK_SIZE] : 0;
        live = live && id_ok(errors, PREFILL_ATTENTION, tile.x, id, num_blocks);
        const u8* from = scale_base + (i < STAGE ? 0 : kv_stride);
        if (live) from += id * block_stride + (KV_SCALE == 1 ? t % BLOCK_SIZE * (int)sizeof(float) : 0);
        copy4_async(scales + i * sizeof(float), from, live);
      }
    }
    copies_end();
  };

  const int from = begin / STEP * STEP;
  copy_stage(from, shared);
  for (int at = from, turn = 0; at < end; at += STAGE, turn ^= 1) {
    if (at + STAGE < end) {
      copy_stage(at + STAGE, shared + (turn ^ 1) * STAGE_BYTES);
      copies_wait<1>();
    } else copies_wait<0>();
    __syncthreads();
    const u8* stage = shared + turn * STAGE_BYTES;
    for (int sub = 0; sub < STAGE; sub += STEP) {
      const int t = at + sub;
      if (t >= warp_end || t + STEP <= warp_begin) continue;
#if KV_CHECK_IDS
      const int id = table[t / BLOCK_SIZE];
      if (id < 0 || id >= num_blocks) continue;  // recorded by the copy
#endif
      Keys k;
      Values v;
      load_keys<true>(k, stage + sub * K_PITCH, K_PITCH, lane);
      float s[TILES][4];
      multiply_keys(s, rows, k);
      Scales scales;
      if constexpr (AREA_SCALES) {
        const float* p = reinterpret_cast<const float*>(stage + STAGE * (K_PITCH + V_PITCH)) + sub + quad;
        scales.key[0] = p[0], scales.key[1] = p[8], scales.value[0] = p[STAGE], scales.value[1] = p[STAGE + 8];
      }
      int distance[TILES][2][2];
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) distance[n][i >> 1][i & 1] = t + quad + 8 * (i >> 1) - position[n][i & 1];
      finish_logits(s, rows, scales, cap, distance);
      if (t + STEP - 1 > warp_low || (KV_WINDOW && t <= warp_high - window)) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int d = distance[n][i >> 1][i & 1];
            if (d > 0 || (KV_WINDOW && d <= -window)) s[n][i] = minus_infinity();
          }
      }
      load_values<true>(v, stage + STAGE * K_PITCH + sub * V_PITCH, V_PITCH, lane);
      fold(rows, s, v, scales);
    }
    __syncthreads();
  }

  finish_sums(rows);
  float value_scale = 1.f;
#if KV_SCALE == 2
  value_scale = head_scales[kv_heads + kv_head];
#endif
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int r = first_row + 8 * n + 2 * part + c;
      if (r >= num_rows) continue;
      const float f = (AREA_SCALES ? rows.unit : value_scale) / rows.sum[n][c];
      io_t* to = out + ((sequence.x + r / GROUP) * (i64)(kv_heads * GROUP) + kv_head * GROUP + r % GROUP) * HEAD_DIM;
#pragma unroll
      for (int i = 0; i < V_SHARE / 2; i++)
        *reinterpret_cast<u32*>(to + element_of<8>(2 * i, quad)) =
            pack2<KV_IO == 2>(rows.o[n][i][c] * f, rows.o[n][i][2 + c] * f);
    }
}
KVEMU_KERNEL(prefill_attention)
