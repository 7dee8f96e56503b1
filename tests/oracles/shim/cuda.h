// Just enough of CUDA for the entry writers of GPUNetIO's device headers to compile on a CPU.
#pragma once
#include <cassert>
#include <cstdint>
#define __device__
#define __host__
#define __forceinline__ inline
struct Dim3 {
  unsigned x, y, z;
};
static const Dim3 threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0}, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};
template <typename... T>
unsigned __shfl_sync(T...) {
  return 0;
}
template <typename... T>
unsigned long long atomicCAS(T...);
template <typename... T>
unsigned long long atomicCAS_block(T...);
unsigned __funnelshift_r(unsigned, unsigned, unsigned);
inline void __syncwarp(unsigned = 0) {}
inline unsigned __activemask() { return 1; }
