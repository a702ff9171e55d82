// Write the keys and values of new tokens into their slots, one layer; an e4m3 cache is quantised on the way.
//
// -D: KV_DTYPE, KV_IO (float32, float16 or bfloat16 for an e4m3 cache; KV_DTYPE otherwise), KV_SCALE (1 or 2 for e4m3),
// KV_HEAD_DIM (a multiple of 16 bytes of the cache), KV_BLOCK_SIZE, KV_CHECK_IDS.
//
// LANES neighbouring lanes share the row of one (token, kv head), a unit of 16 bytes of the cache each, and do its key
// and its value: two loads in flight or more, and a largest magnitude in log2(LANES) shuffles. LANES is a power of two,
// so in a head of 80 or 96 elements some lanes of a row have no unit: they take part in the shuffles with 0.
//
// A negative slot is padding and is skipped. Launch: one row a lane group, ceil(rows * LANES / 256) thread blocks.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNIT = 16 / sizeof(kv_t);                // elements of a unit
constexpr int UNITS = KV_HEAD_DIM / UNIT;              // of a row
constexpr int LANES = lanes_for(UNITS);
constexpr int PASSES = (UNITS + LANES - 1) / LANES;    // more than one beyond 512 bytes of a row
constexpr int LOADS = UNIT * sizeof(io_t) / 16;        // 16-byte loads of a unit
constexpr i64 ROW_BYTES = KV_HEAD_DIM * sizeof(kv_t);
static_assert(KV_HEAD_DIM % UNIT == 0, "a head is a multiple of 16 bytes");
static_assert(KV_DTYPE == 3 ? KV_SCALE == 1 || KV_SCALE == 2 : KV_SCALE == 0, "e4m3 takes scales per token or head");

// Strides of key and value in elements, all others in bytes. head_scales: [2][heads] of this layer (KV_SCALE 2).
extern "C" __global__ void __launch_bounds__(THREADS)
write_kv(const io_t* key, const io_t* value, i64 key_token, i64 key_head, i64 value_token, i64 value_head,
         const i64* slot_mapping, u32 tokens, u32 heads, char* pool, i64 layer_offset, i64 block_stride, i64 kv_stride,
         i64 scale_offset, const float* head_scales, i64 num_slots, int* errors) {
  const u32 row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  const u32 token = row / heads, head = row % heads;
  const int lane = threadIdx.x % LANES;
  i64 slot = -1;
  if (token < tokens) slot = slot_mapping[token];
  const bool wanted = slot >= 0 && id_ok(errors, WRITE_KV, token, slot, num_slots);
#if KV_SCALE != 1
  if (!wanted) return;
#endif
  uint4 raw[2][PASSES][LOADS];
#pragma unroll
  for (int kv = 0; kv < 2; kv++) {
    const io_t* from = kv ? value + token * value_token + head * value_head : key + token * key_token + head * key_head;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int unit = p * LANES + lane;
        raw[kv][p][i] = make_uint4(0, 0, 0, 0);
        if (wanted && unit < UNITS) raw[kv][p][i] = load16_once(reinterpret_cast<const char*>(from + unit * UNIT) + i * 16);
      }
  }
  const u64 at = wanted ? slot : 0;                    // unsigned: the division by a constant becomes a shift
  const i64 block = at / KV_BLOCK_SIZE;
  const int offset = at % KV_BLOCK_SIZE;
  char* area = pool + layer_offset + block * block_stride;
#pragma unroll
  for (int kv = 0; kv < 2; kv++) {
    char* to = area + kv * kv_stride + ((i64)head * KV_BLOCK_SIZE + offset) * ROW_BYTES;
#if KV_SCALE == 1
    float amax = 0.f;
#pragma unroll
    for (int p = 0; p < PASSES; p++) amax = fmaxf(amax, largest16<io_t>(raw[kv][p]));
    const float scale = e4m3_scale(max_of_lanes(amax, LANES));
    float* scales = reinterpret_cast<float*>(area + kv * kv_stride + scale_offset);
    if (wanted && lane == 0) scales[head * KV_BLOCK_SIZE + offset] = scale;
#elif KV_SCALE == 2
    const float scale = head_scales[kv * heads + head];
#endif
#if KV_DTYPE == 3
    const float inv = 1.f / scale;
#endif
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const int unit = p * LANES + lane;
#if KV_DTYPE == 3
      const uint4 packed = quantise16<io_t>(raw[kv][p], inv);
#else
      const uint4 packed = raw[kv][p][0];
#endif
      if (wanted && unit < UNITS) store16(to + unit * 16, packed);
    }
  }
}
KVEMU_KERNEL(write_kv)
