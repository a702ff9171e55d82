// Join the partial results of sequences that decode.cu took in pieces.
//
// Grid (merges, query heads), KV_HEAD_DIM / 2 threads, two elements each.
#include "mma.cuh"

#ifndef KV_HEAD_DIM
#define KV_HEAD_DIM 128
#endif

// merges[i]: {sequence, first partial result, end, 0}; first = end for an empty sequence, which gets zeros.
extern "C" __global__ void __launch_bounds__(KV_HEAD_DIM / 2)
merge_partials(io_t* out, const float2* partial, const float2* partial_max_sum, const int4* merges) {
  const int4 merge = merges[blockIdx.x];
  const int head = blockIdx.y, heads = gridDim.y;
  float top = __uint_as_float(0xff800000u);
#pragma unroll 4
  for (int i = merge.y; i < merge.z; i++) top = fmaxf(top, partial_max_sum[(i64)i * heads + head].x);
  if (top == __uint_as_float(0xff800000u)) top = 0.f;
  float sum = 0.f, o0 = 0.f, o1 = 0.f;
#pragma unroll 4
  for (int i = merge.y; i < merge.z; i++) {
    const float2 max_sum = partial_max_sum[(i64)i * heads + head];
    const float2 o = partial[((i64)i * heads + head) * (KV_HEAD_DIM / 2) + threadIdx.x];
    const float weight = max_sum.y * exp2_fast(max_sum.x - top);
    sum += weight, o0 += weight * o.x, o1 += weight * o.y;
  }
  const bool empty = merge.y == merge.z;
  reinterpret_cast<u32*>(out)[((i64)merge.x * heads + head) * (KV_HEAD_DIM / 2) + threadIdx.x] =
      empty ? 0u : pack2<KV_IO == 2>(o0 / sum, o1 / sum);
}
KVEMU_KERNEL(merge_partials)
