// What decode and prefill share: a warp that takes 16 tokens a step for 8 or 16 rows (queries), all in registers.
//
// Tokens are the 16 rows of the products and queries their 8 columns:
//   S (16 tokens x 8 rows) = K Q^T,  then  O (16 dims x 8 rows) += V^T P.
// A group of up to 8 query heads thus costs half of what it would as one side of 16, in products and in registers.
// A contraction may run in any order, so a lane takes *neighbouring* elements (16 bytes) of its tokens where the
// instruction names scattered ones, and the queries are loaded with the same permutation:
//   K: lane (quad, part) holds a fourth (part) of the elements of tokens quad and quad+8
//   V: it holds an eighth (quad) of those of tokens 2*part, 2*part+1, 2*part+8, 2*part+9
//   S: tokens quad and quad+8 of rows 2*part and 2*part+1;  O: its eighth of those two rows
// P is kept as hi + lo, two products: 16 bits of it in bf16, 22 in fp16 (e4m3 is widened to fp16).
//
// Constants by -D besides those of common.cuh:
//   KV_GROUP     query heads per kv head, 1..16
//   KV_SOFT_CAP  1: logits are soft_cap * tanh(logit / soft_cap)
//   KV_ALIBI     1: slope * (key position - query position) is added
#pragma once
#include "mma.cuh"

#ifndef KV_HEAD_DIM
#define KV_HEAD_DIM 128
#endif
#ifndef KV_BLOCK_SIZE
#define KV_BLOCK_SIZE 16
#endif
#ifndef KV_GROUP
#define KV_GROUP 8
#endif
#ifndef KV_SOFT_CAP
#define KV_SOFT_CAP 0
#endif
#ifndef KV_ALIBI
#define KV_ALIBI 0
#endif

constexpr int HEAD_DIM = KV_HEAD_DIM;
constexpr int BLOCK_SIZE = KV_BLOCK_SIZE;
constexpr int GROUP = KV_GROUP;
constexpr bool E4M3 = KV_DTYPE == 3;
constexpr bool BF16 = KV_DTYPE == 2;  // operands of the products; otherwise fp16
constexpr int ITEM = E4M3 ? 1 : 2;    // bytes of an element
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 64 && HEAD_DIM <= 256, "head_dim: 64, 80, 96, 128 or 256");
static_assert(BLOCK_SIZE % 16 == 0, "a step of 16 tokens must lie in one block");
static_assert(GROUP >= 1 && GROUP <= 16, "1 to 16 query heads per kv head");
static_assert(KV_DTYPE != 0 && KV_IO != 0 && KV_IO != 3, "caches of 16 or 8 bits, queries of 16");
static_assert(E4M3 || KV_IO == KV_DTYPE, "queries are of the cache's type");
static_assert(E4M3 == (KV_SCALE != 0), "scales belong to e4m3");

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int STEP = 16;  // tokens a warp takes at once
constexpr float LOG2E = 1.4426950408889634f;

// P lies within 0..1. Halves have few exponents: P is kept 2^14 times larger, so that what falls into their subnormals
// is below 2^-38. The factor cancels against that of the sum.
constexpr float P_SHIFT = BF16 ? 0.f : 14.f;

// Scales within an area (per token or per block). V's multiply P, which must stay within 0..2^14: they are divided by
// `unit`, the largest power of two at or below any scale seen, and O is kept in units of it.
constexpr bool AREA_SCALES = KV_SCALE == 1 || KV_SCALE == 3;

KV_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }
KV_DEVICE float finite_max(float m) { return m == minus_infinity() ? 0.f : m; }  // what is subtracted: never -inf - -inf

// ---- a lane's share of a row --------------------------------------------------------------------
// LANES lanes share the HEAD_DIM elements of a token. Each takes TOTAL = HEAD_DIM / LANES of them in pieces of 16 bytes
// while they last, then 8, 4 and 2 (head_dim 80 and 96); piece AT..AT+width of all lanes together is contiguous.

KV_DEVICE constexpr int piece_width(int total, int at) {
  int width = 16 / ITEM;
  while (at + width > total) width /= 2;
  return width;
}
KV_DEVICE constexpr int piece_start(int total, int index) {
  int at = 0;
  while (at + piece_width(total, at) <= index) at += piece_width(total, at);
  return at;
}
// Which element of the row is the `index`-th of a lane's share.
template <int LANES> KV_DEVICE constexpr int element_of(int index, int lane) {
  const int total = HEAD_DIM / LANES, at = piece_start(total, index);
  return LANES * at + lane * piece_width(total, at) + (index - at);
}
// The reverse, for 8 lanes: index * 8 + lane.
template <int AT = 0> KV_DEVICE int place_of(int element) {
  constexpr int total = HEAD_DIM / 8, width = piece_width(total, AT);
  if (AT + width >= total || element < 8 * (AT + width)) {
    const int rest = element - 8 * AT;
    return (AT + rest % width) * 8 + rest / width;
  }
  if constexpr (AT + width < total) return place_of<AT + width>(element);
  else return 0;
}

// 2 to 16 bytes of global memory, not kept in L1, into registers. Volatile: they are all issued where they stand, ahead
// of the mathematics.
template <int BYTES> KV_DEVICE void load_once(const u8* p, u32* to) {
  if constexpr (BYTES == 16) {
    const uint4 v = load16_once(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
#ifdef KV_EMU
    if constexpr (BYTES == 8) to[0] = reinterpret_cast<const uint2*>(p)->x, to[1] = reinterpret_cast<const uint2*>(p)->y;
    else if constexpr (BYTES == 4) to[0] = *reinterpret_cast<const u32*>(p);
    else to[0] = *reinterpret_cast<const u16*>(p);
#else
    if constexpr (BYTES == 8)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(p));
    else if constexpr (BYTES == 4)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(to[0]) : "l"(p));
    else {
      u16 v;
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u16 %0, [%1];" : "=h"(v) : "l"(p));
      to[0] = v;
    }
#endif
  }
}

// Copies of 16 and 4 bytes from global to shared memory that run on their own; without `live` zeros are written. They
// are gathered in groups by copies_end; copies_wait<N> waits until at most the last N groups are under way.
KV_DEVICE void copy16_async(void* shared, const void* global, bool live) {
#ifdef KV_EMU
  kvemu_cp_async(shared, global, 16, live ? 16 : 0);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(live ? 16 : 0)
               : "memory");
#endif
}
KV_DEVICE void copy4_async(void* shared, const void* global, bool live) {
#ifdef KV_EMU
  kvemu_cp_async(shared, global, 4, live ? 4 : 0);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global),
               "r"(live ? 4 : 0)
               : "memory");
#endif
}
KV_DEVICE void copies_end() {
#ifdef KV_EMU
  kvemu_cp_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int UNDER_WAY> KV_DEVICE void copies_wait() {
#ifdef KV_EMU
  kvemu_cp_wait(UNDER_WAY);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
#endif
}

template <int BYTES> KV_DEVICE void load_shared(const u8* p, u32* to) {
  if constexpr (BYTES == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    to[0] = v.x, to[1] = v.y;
  } else if constexpr (BYTES == 4) to[0] = *reinterpret_cast<const u32*>(p);
  else to[0] = *reinterpret_cast<const u16*>(p);
}
template <int LANES, bool SHARED, int AT = 0> KV_DEVICE void load_share(const u8* row, int lane, u32* to) {
  constexpr int total = HEAD_DIM / LANES;
  if constexpr (AT < total) {
    constexpr int width = piece_width(total, AT);
    const u8* p = row + (LANES * AT + lane * width) * ITEM;
    if constexpr (SHARED) load_shared<width * ITEM>(p, to + AT * ITEM / 4);
    else load_once<width * ITEM>(p, to + AT * ITEM / 4);
    load_share<LANES, SHARED, AT + width>(row, lane, to);
  }
}

constexpr int K_SHARE = HEAD_DIM / 4, V_SHARE = HEAD_DIM / 8;  // elements
constexpr int K_WORDS = K_SHARE * ITEM / 4, V_WORDS = (V_SHARE * ITEM + 3) / 4;

struct Keys {
  u32 token[2][K_WORDS];  // tokens quad, quad+8
};
struct Values {
  u32 token[4][V_WORDS];  // tokens 2*part, 2*part+1, 2*part+8, 2*part+9
};

// `rows` is where token 0 of the step starts, `pitch` the bytes between tokens.
template <bool SHARED> KV_DEVICE void load_keys(Keys& k, const u8* rows, int pitch, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) load_share<4, SHARED>(rows + ((lane >> 2) + 8 * i) * pitch, lane & 3, k.token[i]);
}
template <bool SHARED> KV_DEVICE void load_values(Values& v, const u8* rows, int pitch, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    load_share<8, SHARED>(rows + (2 * (lane & 3) + (i & 1) + (i >> 1) * 8) * pitch, lane >> 2, v.token[i]);
}
// Values of tokens outside first..end-1 of the step become 0: their memory may hold NaN, and 0 * NaN is NaN.
KV_DEVICE void clear_values(Values& v, int first, int end, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * (lane & 3) + (i & 1) + (i >> 1) * 8;
    const u32 keep = token >= first && token < end ? ~0u : 0u;
#pragma unroll
    for (int w = 0; w < V_WORDS; w++) v.token[i][w] &= keep;
  }
}

// ---- scales -------------------------------------------------------------------------------------

// Scales of the lane's tokens, quad and quad+8.
struct Scales {
  float key[2], value[2];
};

// ---- the rows of a warp -------------------------------------------------------------------------

// TILES tiles of 8 rows. Column c of tile n is row 8*n + 2*part + c. With Q_SHARED the queries lie in shared memory, each
// lane's own share 32 places apart, where registers are too few for them.
template <int TILES, bool Q_SHARED = false> struct Rows {
  uint2 q_kept[Q_SHARED ? 1 : TILES][Q_SHARED ? 1 : K_SHARE / 4];  // row 8*n + quad, the lane's fourth: 4 elements each
  uint2* q_shared;
  float factor[TILES][2];             // of the logits (differs by row where queries were scaled)
  float slope[TILES][2];              // ALiBi, in base 2
  float max[TILES][2];                // largest base-2 logit so far, the same in all lanes that share the row
  float sum[TILES][2];                // of P over this lane's tokens
  float o[TILES][V_SHARE / 2][4];     // elements 2i (rows c = 0, 1), then 2i+1
  float unit;                         // of o: a power of two

  KV_DEVICE uint2& q(int n, int g) {
    if constexpr (Q_SHARED) return q_shared[(n * (K_SHARE / 4) + g) * 32];
    else return q_kept[n][g];
  }
};

template <int TILES, bool Q_SHARED> KV_DEVICE void start(Rows<TILES, Q_SHARED>& r) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
#pragma unroll
    for (int c = 0; c < 2; c++) r.max[n][c] = minus_infinity(), r.sum[n][c] = 0.f, r.slope[n][c] = 0.f;
#pragma unroll
    for (int i = 0; i < V_SHARE / 2; i++) r.o[n][i][0] = r.o[n][i][1] = r.o[n][i][2] = r.o[n][i][3] = 0.f;
  }
  r.unit = __uint_as_float(1u << 23);
}

// Load the query of row 8*n + quad; null where there is no such row. bf16 queries of an e4m3 cache become halves: each
// row is multiplied by a power of two that brings its largest element to 2^14, undone by `factor`.
template <int TILES, bool Q_SHARED>
KV_DEVICE void load_query(Rows<TILES, Q_SHARED>& r, const io_t* const (&row)[TILES], float scale, int lane) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
#pragma unroll
    for (int g = 0; g < K_SHARE / 4; g++) {
      uint2 v = make_uint2(0, 0);
      if (row[n]) v = *reinterpret_cast<const uint2*>(row[n] + element_of<4>(4 * g, lane & 3));
      r.q(n, g) = v;
    }
    if constexpr (E4M3 && KV_IO == 2) {
      float top = 0.f;
#pragma unroll
      for (int g = 0; g < K_SHARE / 4; g++) {
        const uint2 v = r.q(n, g);
        const float2 a = unpack2<true>(v.x), b = unpack2<true>(v.y);
        top = fmaxf(fmaxf(fmaxf(top, fabsf(a.x)), fmaxf(fabsf(a.y), fabsf(b.x))), fabsf(b.y));
      }
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      const u32 exponent = max(__float_as_uint(top) >> 23, 15u);  // 255 for an infinite one, which stays infinite
      const float up = __uint_as_float((268u - exponent) << 23), down = __uint_as_float((exponent - 14u) << 23);
#pragma unroll
      for (int g = 0; g < K_SHARE / 4; g++) {
        const uint2 v = r.q(n, g);
        const float2 a = unpack2<true>(v.x), b = unpack2<true>(v.y);
        r.q(n, g) = make_uint2(pack2<false>(a.x * up, a.y * up), pack2<false>(b.x * up, b.y * up));
      }
#pragma unroll
      for (int c = 0; c < 2; c++) r.factor[n][c] = scale * __shfl_sync(ALL_LANES, down, 4 * (2 * (lane & 3) + c));
    } else {
      r.factor[n][0] = r.factor[n][1] = scale;
    }
  }
}

// Products of the queries with 16 keys: s[n][0..1] token quad, s[n][2..3] token quad+8.
template <int TILES, bool Q_SHARED>
KV_DEVICE void multiply_keys(float (&s)[TILES][4], Rows<TILES, Q_SHARED>& r, const Keys& k) {
#pragma unroll
  for (int n = 0; n < TILES; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int g = 0; g < K_SHARE / 4; g++) {
    u32 a[4];
    if constexpr (E4M3) {
      a[0] = widen_e4m3(k.token[0][g]), a[2] = widen_e4m3(k.token[0][g] >> 16);
      a[1] = widen_e4m3(k.token[1][g]), a[3] = widen_e4m3(k.token[1][g] >> 16);
    } else {
      a[0] = k.token[0][2 * g], a[2] = k.token[0][2 * g + 1];
      a[1] = k.token[1][2 * g], a[3] = k.token[1][2 * g + 1];
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const uint2 q = r.q(n, g);
      mma_m16n8k16<BF16>(s[n], a, q.x, q.y);
    }
  }
}

// What a product is multiplied by first: towards base 2, or towards the argument of tanh.
KV_DEVICE float logit_factor(float scale, float cap) { return KV_SOFT_CAP ? scale / cap : scale * LOG2E; }

// From products to logits in base 2. `distance[n][i][c]`: positions from the row's query to the lane's i-th token, <= 0.
template <int TILES, bool Q_SHARED>
KV_DEVICE void finish_logits(float (&s)[TILES][4], const Rows<TILES, Q_SHARED>& r, const Scales& scales, float cap,
                             const int (&distance)[TILES][2][2]) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int token = e >> 1, c = e & 1;
      float x = s[n][e] * r.factor[n][c];
      if constexpr (AREA_SCALES) x *= scales.key[token];
#if KV_SOFT_CAP
      x = cap * LOG2E * tanhf(x);
#endif
#if KV_ALIBI
      x += r.slope[n][c] * (float)distance[n][token][c];
#endif
      s[n][e] = x;
    }
}

// One step of the online softmax: fold 16 tokens in. Logits of tokens that do not count are -inf, and their values 0.
template <int TILES, bool Q_SHARED>
KV_DEVICE void fold(Rows<TILES, Q_SHARED>& r, float (&s)[TILES][4], const Values& v, const Scales& scales) {
  // The largest logit seldom grows after the first steps: one vote decides whether anything has to be rescaled.
  bool grows = false;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) grows |= fmaxf(s[n][c], s[n][2 + c]) > r.max[n][c];
  float scale = 0.f;
  if constexpr (AREA_SCALES) {
    scale = fmaxf(scales.value[0], scales.value[1]);
    grows |= scale >= 2.f * r.unit;
  }
  if (__any_sync(ALL_LANES, grows)) {
    float unit_factor = 1.f;
    if constexpr (AREA_SCALES) {
      scale = fmaxf(scale, __shfl_xor_sync(ALL_LANES, scale, 4));
      scale = fmaxf(scale, __shfl_xor_sync(ALL_LANES, scale, 8));
      scale = fmaxf(scale, __shfl_xor_sync(ALL_LANES, scale, 16));
      // a power of two within 2^-120..2^120, so that its inverse is one too
      const u32 power = min(max(__float_as_uint(scale) & 0x7f800000u, 7u << 23), 247u << 23);
      const float unit = fmaxf(r.unit, __uint_as_float(power));
      unit_factor = r.unit / unit;
      r.unit = unit;
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float top = fmaxf(s[n][c], s[n][2 + c]);
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 4));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 8));
        top = fmaxf(fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 16)), r.max[n][c]);
        factor[c] = exp2_fast(r.max[n][c] - finite_max(top));
        r.max[n][c] = top;
        r.sum[n][c] *= factor[c];
        factor[c] *= unit_factor;
      }
#pragma unroll
      for (int i = 0; i < V_SHARE / 2; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) r.o[n][i][e] *= factor[e & 1];
    }
  }

  u32 high[TILES][2], low[TILES][2];
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      p[e] = exp2_fast(s[n][e] - (finite_max(r.max[n][e & 1]) - P_SHIFT));
      r.sum[n][e & 1] += p[e];
    }
    if constexpr (AREA_SCALES) {
      const float inverse = __uint_as_float((254u << 23) - __float_as_uint(r.unit));
#pragma unroll
      for (int e = 0; e < 4; e++) p[e] *= scales.value[e >> 1] * inverse;
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const u32 pair = pack2<BF16>(p[2 * t], p[2 * t + 1]);
      const float2 kept = unpack2<BF16>(pair);
      high[n][t] = transpose_8x8(pair);
      low[n][t] = transpose_8x8(pack2<BF16>(p[2 * t] - kept.x, p[2 * t + 1] - kept.y));
    }
  }
#pragma unroll
  for (int i = 0; i < V_SHARE / 2; i++) {
    u32 a[4];
    if constexpr (E4M3) {
      const u32 pick = i & 1 ? 0x7362u : 0x5140u;
      const u32 near = __byte_perm(v.token[0][i / 2], v.token[1][i / 2], pick);
      const u32 far = __byte_perm(v.token[2][i / 2], v.token[3][i / 2], pick);
      a[0] = widen_e4m3(near), a[1] = widen_e4m3(near >> 16);
      a[2] = widen_e4m3(far), a[3] = widen_e4m3(far >> 16);
    } else {
      a[0] = __byte_perm(v.token[0][i], v.token[1][i], 0x5410u);
      a[1] = __byte_perm(v.token[0][i], v.token[1][i], 0x7632u);
      a[2] = __byte_perm(v.token[2][i], v.token[3][i], 0x5410u);
      a[3] = __byte_perm(v.token[2][i], v.token[3][i], 0x7632u);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      mma_m16n8k16<BF16>(r.o[n][i], a, high[n][0], high[n][1]);
      mma_m16n8k16<BF16>(r.o[n][i], a, low[n][0], low[n][1]);
    }
  }
}

// Sum over the lanes that share a row.
template <int TILES, bool Q_SHARED> KV_DEVICE void finish_sums(Rows<TILES, Q_SHARED>& r) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      r.sum[n][c] += __shfl_xor_sync(ALL_LANES, r.sum[n][c], 4);
      r.sum[n][c] += __shfl_xor_sync(ALL_LANES, r.sum[n][c], 8);
      r.sum[n][c] += __shfl_xor_sync(ALL_LANES, r.sum[n][c], 16);
    }
}
