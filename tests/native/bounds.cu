// Kernels with every kind of bound, for what nvcc makes of them.
struct Large { char bytes[6000]; };
struct Small { int values[5]; };
__device__ float common(int i) {
    __shared__ float values[100];
    values[threadIdx.x % 100] = i;
    __syncthreads();
    return values[(i + 1) % 100];
}
__global__ void __launch_bounds__(160, 2) bound(int *p) { p[threadIdx.x] = 1; }
__global__ void plain(Large large, int *p, float f, char c, Small small) { *p = large.bytes[small.values[3]] + f + c; }
__global__ void own_and_common(int *p) {
    __shared__ int values[1000];
    values[threadIdx.x] = *p;
    __syncthreads();
    *p = values[threadIdx.x ^ 1] + common(*p);
}
__global__ void uses_common(int *p) { *p = common(1); }
__global__ void dynamic(int *p) {
    extern __shared__ int values[];
    values[threadIdx.x] = 1;
    *p = values[0];
}
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
__global__ void __cluster_dims__(2, 1, 1) cluster(int *p) { *p = 1; }
__global__ void __launch_bounds__(128, 1, 4) ranked(int *p) { *p = 1; }
__global__ void __block_size__((128, 2, 1)) fixed(int *p) { *p = 1; }
#endif
