// The toolkit's own count of resident blocks: one line of numbers each, asked on standard input.

#include <cuda_occupancy.h>

#include <cstdio>

int main() {
    int arch, most_threads, shared_of_block, threads, registers, shared_bytes, barriers;
    while (std::scanf("%d %d %d %d %d %d %d", &arch, &most_threads, &shared_of_block, &threads,
                      &registers, &shared_bytes, &barriers) == 7) {
        cudaOccDeviceProp device;
        device.computeMajor = arch / 10;
        device.computeMinor = arch % 10;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = most_threads;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 49152;
        device.reservedSharedMemPerBlock = arch < 80 ? 0 : 1024;
        device.sharedMemPerBlockOptin = shared_of_block;
        device.sharedMemPerMultiprocessor = shared_of_block + device.reservedSharedMemPerBlock;
        device.numSms = 1;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = 0;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = shared_bytes;
        kernel.numBlockBarriers = barriers;
        cudaOccDeviceState state;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        cudaOccError status = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &device, &kernel, &state, threads, shared_bytes);
        std::printf("%d\n", status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
    }
}
