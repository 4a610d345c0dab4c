// Function qualifiers that vanish for a host compiler, and namespaces of instruction sets.
#pragma once

#if defined(__CUDACC__)
#define ANYFLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define ANYFLASH_DEVICE __device__ __forceinline__
#else
#define ANYFLASH_HOST_DEVICE inline
#define ANYFLASH_DEVICE inline
#endif

#if defined(__CUDACC__)
#define ANYFLASH_UNROLL _Pragma("unroll")
#else
#define ANYFLASH_UNROLL
#endif

// After the parameters of a lambda that holds fragments: a call would put them into memory.
#if defined(__GNUC__)
#define ANYFLASH_INLINE_LAMBDA __attribute__((always_inline))
#else
#define ANYFLASH_INLINE_LAMBDA
#endif

// Code that CPU kernels share with the GPU's is compiled once for each instruction set. Inline
// functions of one name must be the same everywhere, or the linker may put AVX-512 code into the
// baseline's kernels. Hence each instruction set has a namespace, which the generated units name.
#if !defined(ANYFLASH_SHARED_NAMESPACE)
#define ANYFLASH_SHARED_NAMESPACE anyflash
#endif
