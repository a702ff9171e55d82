// Paged attention of one new token per sequence: groups of 1 to 16 query heads, long sequences in pieces.
//
// Grid (pieces, kv heads * HEAD_TILES), 128 threads. The four warps of a piece take steps of 16 tokens in turn: K and V
// go from global memory straight to registers, all loads of a step issued before its mathematics, the id of the next
// step's block read a step ahead. The warps meet once, at the end. A sequence in several pieces leaves normalised
// partial results, which merge.cu joins. Constants by -D besides those of attention.cuh:
//   KV_MIN_CTAS   blocks of threads per multiprocessor that registers must leave room for
#include "attention.cuh"

#ifndef KV_MIN_CTAS
#define KV_MIN_CTAS 2
#endif

// 16 heads of 256 elements do not fit a warp's registers: two blocks of threads take 8 each, and the second reads the
// keys and values from L2.
constexpr int HEADS = HEAD_DIM == 256 && GROUP > 8 ? 8 : GROUP;
constexpr int HEAD_TILES = (GROUP + HEADS - 1) / HEADS;
constexpr int TILES = (HEADS + 7) / 8;
constexpr int PITCH = HEAD_DIM + 4;  // floats of a row in shared memory: 4 more keep the lanes of a store in unlike banks

// With every option at once the debugging check of ids does not fit the registers of this one variant.
constexpr bool ONE_LESS =
    E4M3 && AREA_SCALES && HEAD_DIM == 64 && TILES == 2 && KV_SOFT_CAP && KV_ALIBI && KV_CHECK_IDS && KV_MIN_CTAS > 1;

// pieces[i]: {sequence, first token, end token, partial result or -1}. Strides of the cache in bytes: `layer` from the
// pool's start to the layer, `scale` from an area's start to its scales, `scale_head` between those of heads; the others
// of the query in elements and of the table in entries. Shared memory: (4 * HEADS * (PITCH + 2)) floats.
extern "C" __global__ void __launch_bounds__(THREADS, ONE_LESS ? KV_MIN_CTAS - 1 : KV_MIN_CTAS)
decode_attention(io_t* out, float* partial, float2* partial_max_sum, const io_t* query, i64 query_row, i64 query_head,
                 const u8* cache, i64 layer, i64 block_stride, i64 kv_stride, i64 head_stride, i64 scale_offset,
                 i64 scale_head, const float* head_scales, const int* tables, i64 table_row, const int* seq_lens,
                 const float* slopes, const int4* pieces, int kv_heads, int num_blocks, float scale, float cap,
                 int* errors) {
  KV_SMEM(float, shared);  // o [WARPS][HEADS][PITCH], then max and sum [WARPS][HEADS]
  const int4 piece = pieces[blockIdx.x];
  const int seq = piece.x, first = piece.y, end = piece.z;
  const int kv_head = blockIdx.y / HEAD_TILES, first_head = blockIdx.y % HEAD_TILES * HEADS;
  const int heads = min(HEADS, GROUP - first_head), q_head = kv_head * GROUP + first_head, q_heads = kv_heads * GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
  const int* table = tables + seq * table_row;
  const u8* base = cache + layer + kv_head * head_stride;

  Rows<TILES> rows;
  start(rows);
  const io_t* row[TILES];
#pragma unroll
  for (int n = 0; n < TILES; n++)
    row[n] = 8 * n + quad < heads ? query + seq * query_row + (q_head + 8 * n + quad) * query_head : nullptr;
  float factor = logit_factor(scale, cap);
#if KV_SCALE == 2
  factor *= head_scales[kv_head];
#endif
  load_query(rows, row, factor, lane);
#if KV_ALIBI
  const int position = seq_lens[seq] - 1;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (8 * n + 2 * part + c < heads) rows.slope[n][c] = slopes[q_head + 8 * n + 2 * part + c] * LOG2E;
#endif

  int at = first / STEP * STEP + warp * STEP;
  int block = at < end ? table[at / BLOCK_SIZE] : 0;
  for (; at < end; at += WARPS * STEP) {
    const int id = block, next = at + WARPS * STEP;
    if (next < end) block = table[next / BLOCK_SIZE];
    if (!id_ok(errors, DECODE_ATTENTION, seq, id, num_blocks)) continue;
    const u8* keys = base + id * block_stride + at % BLOCK_SIZE * (HEAD_DIM * ITEM);
    Scales scales;
#if KV_SCALE == 1 || KV_SCALE == 3
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = KV_SCALE == 1 ? at % BLOCK_SIZE + quad + 8 * i : 0;
      const u8* p = cache + layer + id * block_stride + scale_offset + kv_head * scale_head + token * sizeof(float);
      scales.key[i] = *reinterpret_cast<const float*>(p);
      scales.value[i] = *reinterpret_cast<const float*>(p + kv_stride);
    }
#endif
    Keys k;
    Values v;
    load_keys<false>(k, keys, HEAD_DIM * ITEM, lane);
    load_values<false>(v, keys + kv_stride, HEAD_DIM * ITEM, lane);

    float s[TILES][4];
    multiply_keys(s, rows, k);
    int distance[TILES][2][2];
#if KV_ALIBI
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) distance[n][i >> 1][i & 1] = at + quad + 8 * (i >> 1) - position;
#endif
    finish_logits(s, rows, scales, cap, distance);
    if (at < first || at + STEP > end) {
      clear_values(v, first - at, end - at, lane);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int token = at + quad + 8 * i;
        if (token >= first && token < end) continue;
        if constexpr (AREA_SCALES) scales.value[i] = 0.f;
#pragma unroll
        for (int n = 0; n < TILES; n++) s[n][2 * i] = s[n][2 * i + 1] = minus_infinity();
      }
    }
    fold(rows, s, v, scales);
  }

  finish_sums(rows);
  float* maxima = shared + WARPS * HEADS * PITCH;
  float* sums = maxima + WARPS * HEADS;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int head = 8 * n + 2 * part + c;
      if (head >= heads) continue;
      if (quad == 0) maxima[warp * HEADS + head] = rows.max[n][c], sums[warp * HEADS + head] = rows.sum[n][c];
      float* to = shared + (warp * HEADS + head) * PITCH + quad;  // element a of the share at a * 8 + quad
#pragma unroll
      for (int i = 0; i < V_SHARE / 2; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          to[(2 * i + e) * 8] = AREA_SCALES ? rows.o[n][i][2 * e + c] * rows.unit : rows.o[n][i][2 * e + c];
    }
  __syncthreads();

  float value_scale = 1.f;
#if KV_SCALE == 2
  value_scale = head_scales[kv_heads + kv_head];
#endif
  for (int i = threadIdx.x; i < heads * (HEAD_DIM / 2); i += THREADS) {
    const int head = i / (HEAD_DIM / 2), element = i % (HEAD_DIM / 2) * 2, place = place_of(element);
    float top = maxima[head], sum = 0.f, o0 = 0.f, o1 = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, maxima[w * HEADS + head]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_fast(maxima[w * HEADS + head] - finite_max(top));
      const float* o = shared + (w * HEADS + head) * PITCH + place;
      sum += sums[w * HEADS + head] * f, o0 += o[0] * f, o1 += o[8] * f;
    }
    const i64 at_row = (piece.w < 0 ? seq : piece.w) * (i64)q_heads + q_head + head;
    if (piece.w < 0) {  // a sum of 0 means that all logits are -inf: 0 / 0 is what softmax gives then
      o0 = o0 / sum * value_scale, o1 = o1 / sum * value_scale;
      *reinterpret_cast<u32*>(out + at_row * HEAD_DIM + element) = pack2<KV_IO == 2>(o0, o1);
    } else {
      if (sum != 0.f) o0 = o0 / sum * value_scale, o1 = o1 / sum * value_scale;
      *reinterpret_cast<float2*>(partial + at_row * HEAD_DIM + element) = make_float2(o0, o1);
      if (element == 0) partial_max_sum[at_row] = make_float2(top, sum);
    }
  }
}
KVEMU_KERNEL(decode_attention)
