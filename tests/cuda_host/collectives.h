// What a warp collective does once all its lanes have arrived.
//
// No library call here: this file is not instrumented, and TSan would take its memcpy for one of the kernel's.
#ifndef KVEMU_COLLECTIVES_H
#define KVEMU_COLLECTIVES_H

#include <cstdint>

// One lane's part in a collective.
struct Lane {
  const void* in;
  void* out;
  int size, param;
};

template <class T>
static T load(const void* p) {
  return *static_cast<const T*>(p);
}

typedef uint32_t Words __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

// The lower (or upper) halves of eight registers, 16-bit floats, as floats.
static inline Floats widen(Words pairs, bool upper, bool bf16) {
  if (bf16) return (Floats)(upper ? pairs & 0xffff0000u : pairs << 16);
  const Words half = upper ? pairs >> 16 : pairs & 0xffffu;
  // Exponents are 112 apart; the product makes normal numbers of subnormal ones.
  const Floats finite = (Floats)((half & 0x7fffu) << 13) * 0x1p112f;
  const Words not_finite = (Words)((half & 0x7c00u) == 0x7c00u);
  const Words magnitude = ((Words)finite & ~not_finite) | ((0x7f800000u | ((half & 0x3ffu) << 13)) & not_finite);
  return (Floats)(magnitude | ((half & 0x8000u) << 16));
}

// mma.sync.m16n8k16, fragments as in the PTX ISA. Sums in float32, added to C at the end.
static void mma_m16n8k16(const Lane (&lanes)[32], bool bf16) {
  struct Operands {
    uint32_t a[4], b[2];
    float c[4];
  };
  alignas(32) uint32_t rows[16][8];  // A, two neighbours in k together
  alignas(32) uint32_t k_pairs[8][8];  // B, for two neighbours in k all columns
  for (int l = 0; l < 32; l++) {
    const auto* p = static_cast<const Operands*>(lanes[l].in);
    const int g = l >> 2, t = l & 3;
    rows[g][t] = p->a[0];
    rows[g + 8][t] = p->a[1];
    rows[g][t + 4] = p->a[2];
    rows[g + 8][t + 4] = p->a[3];
    k_pairs[t][g] = p->b[0];
    k_pairs[t + 4][g] = p->b[1];
  }
  Floats b_even[8], b_odd[8];
  for (int k = 0; k < 8; k++) {
    const Words pairs = *reinterpret_cast<const Words*>(k_pairs[k]);
    b_even[k] = widen(pairs, false, bf16);
    b_odd[k] = widen(pairs, true, bf16);
  }
  Floats sums[16];
  for (int r = 0; r < 16; r++) {
    const Words pairs = *reinterpret_cast<const Words*>(rows[r]);
    const Floats even = widen(pairs, false, bf16), odd = widen(pairs, true, bf16);
    Floats sum = {};
    for (int k = 0; k < 8; k++) sum += even[k] * b_even[k] + odd[k] * b_odd[k];
    sums[r] = sum;
  }
  for (int l = 0; l < 32; l++) {
    const auto* p = static_cast<const Operands*>(lanes[l].in);
    auto* d = static_cast<float*>(lanes[l].out);
    const int g = l >> 2, t = l & 3;
    const float c[4] = {p->c[0], p->c[1], p->c[2], p->c[3]};  // `out` may be where C lies
    d[0] = c[0] + sums[g][t * 2];
    d[1] = c[1] + sums[g][t * 2 + 1];
    d[2] = c[2] + sums[g + 8][t * 2];
    d[3] = c[3] + sums[g + 8][t * 2 + 1];
  }
}

template <class T>
static void shuffle(const Lane (&lanes)[32], unsigned mask) {
  T values[32];
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) values[l] = load<T>(lanes[l].in);
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) *static_cast<T*>(lanes[l].out) = values[lanes[l].param];
}

static void ballot(const Lane (&lanes)[32], unsigned mask) {
  unsigned result = 0;
  for (int l = 0; l < 32; l++)
    if ((mask >> l & 1) && load<int>(lanes[l].in)) result |= 1u << l;
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) *static_cast<unsigned*>(lanes[l].out) = result;
}

static void reduce(const Lane (&lanes)[32], unsigned mask, int how) {
  bool first = true;
  uint32_t r = 0;
  for (int l = 0; l < 32; l++) {
    if (!(mask >> l & 1)) continue;
    const auto v = load<uint32_t>(lanes[l].in);
    if (first) r = v;
    else if (how == KVEMU_ADD) r += v;
    else if (how == KVEMU_MIN) r = int32_t(v) < int32_t(r) ? v : r;
    else if (how == KVEMU_MAX) r = int32_t(v) > int32_t(r) ? v : r;
    else if (how == KVEMU_MIN_U) r = v < r ? v : r;
    else if (how == KVEMU_MAX_U) r = v > r ? v : r;
    else if (how == KVEMU_AND) r &= v;
    else if (how == KVEMU_OR) r |= v;
    else r ^= v;
    first = false;
  }
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) *static_cast<uint32_t*>(lanes[l].out) = r;
}

#endif
