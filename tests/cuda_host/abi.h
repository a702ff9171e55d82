// What kernels, the runtime and the Python side share.
#ifndef KVEMU_ABI_H
#define KVEMU_ABI_H

#define KVEMU_EXPORT extern "C" __attribute__((visibility("default")))

struct kvemu_dim {
  unsigned x, y, z;
};

struct kvemu_launch {
  unsigned grid[3], block[3];
  unsigned smem_bytes;
  int order;  // 0 forward, 1 reverse, 2 random
  unsigned long long seed;
  double seconds;  // processor time after which a launch counts as hanging; 0: never
  char** stacks;   // 1024, null where not made yet: one set for all modules of a process, which has only so many mappings
};

enum kvemu_op {
  KVEMU_SHFL = 1,
  KVEMU_BALLOT,
  KVEMU_SYNCWARP,
  KVEMU_MMA_F16,
  KVEMU_MMA_BF16,
  KVEMU_REDUCE,
};

enum kvemu_reduction { KVEMU_ADD, KVEMU_MIN, KVEMU_MAX, KVEMU_AND, KVEMU_OR, KVEMU_XOR, KVEMU_MIN_U, KVEMU_MAX_U };

extern "C" {
extern kvemu_dim kvemu_threadIdx, kvemu_blockIdx, kvemu_blockDim, kvemu_gridDim;
extern unsigned char* kvemu_smem;  // exactly the dynamic shared bytes of the launch, poisoned with NaN for every block
int kvemu_run(const kvemu_launch* launch, void (*entry)(void*), void* closure, char* error, int size);
int kvemu_lane();
// A collective of the lanes in `mask`; what `in`, `out` (both per lane) and `param` mean is the operation's.
void kvemu_warp_at(int op, unsigned mask, const void* in, void* out, int size, int param, const char* file, int line);
int kvemu_syncthreads_at(int value, const char* file, int line);  // how many threads brought a value other than 0
[[noreturn]] void kvemu_trap_at(const char* message, const char* file, int line);
int kvemu_cp_push(void* dst, const void* src, int size, int src_size, const char* file, int line);  // 1: lands at once
void kvemu_cp_commit();
int kvemu_cp_pop(int keep_groups, void** dst, const void** src, int* size, int* src_size);
}

#endif
