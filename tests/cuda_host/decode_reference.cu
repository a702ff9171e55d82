// The plain way to decode, as a second opinion on cuda/decode.cu: CUDA cores, fp32, one thread an element.
//
// Grid (sequences, query heads), KV_HEAD_DIM threads (a multiple of 16; the last warp may be short). One pass for the
// logits, one for the values. Shared memory: max tokens + KV_HEAD_DIM floats.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
decode_reference(float* out, const io_t* query, const kv_t* cache, const int* tables, int table_row, const int* seq_lens,
                 int group, i64 block_stride, i64 kv_stride, i64 head_stride, float scale) {
  KV_SMEM(float, shared);  // products of one token, then the logits
  const int seq = blockIdx.x, head = blockIdx.y, d = threadIdx.x, tokens = seq_lens[seq];
  const int* table = tables + seq * table_row;
  float* logits = shared + KV_HEAD_DIM;
  const float q = to_float(query[((i64)seq * gridDim.y + head) * KV_HEAD_DIM + d]);
  for (int t = 0; t < tokens; t++) {
    const i64 at = table[t / KV_BLOCK_SIZE] * block_stride + head / group * head_stride;
    shared[d] = q * to_float(cache[at + t % KV_BLOCK_SIZE * KV_HEAD_DIM + d]);
    __syncthreads();
    if (d == 0) {
      float sum = 0.f;
      for (int i = 0; i < KV_HEAD_DIM; i++) sum += shared[i];
      logits[t] = sum * scale;
    }
    __syncthreads();
  }
  float top = -3e38f, sum = 0.f, o = 0.f;
  for (int t = 0; t < tokens; t++) top = fmaxf(top, logits[t]);
  for (int t = 0; t < tokens; t++) {
    const i64 at = table[t / KV_BLOCK_SIZE] * block_stride + head / group * head_stride + kv_stride;
    const float p = expf(logits[t] - top);
    sum += p, o += p * to_float(cache[at + t % KV_BLOCK_SIZE * KV_HEAD_DIM + d]);
  }
  out[((i64)seq * gridDim.y + head) * KV_HEAD_DIM + d] = tokens ? o / sum : 0.f;
}
KVEMU_KERNEL(decode_reference)
