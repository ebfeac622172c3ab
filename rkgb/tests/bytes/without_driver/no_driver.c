/* What torch asks CUDA's runtime and driver for while it runs tensors without content, answered as
   if there were one device. Loaded before the real runtime, whose answer would be an error where no
   driver is installed. Nothing can be allocated or run: all that is missing here still fails. */
#include <cuda_runtime_api.h>
#include <string.h>

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }

/* A Hopper GPU, as far as kernels are chosen by it. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "no driver");
  found->major = 9;
  found->warpSize = 32;
  found->multiProcessorCount = 132;
  found->totalGlobalMem = (size_t)80 << 30;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 227 << 10;
  return device ? cudaErrorInvalidDevice : cudaSuccess;
}

/* Autograd notes the stream of every tensor, and lets streams wait for each other. */
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  return *least = *most = 0, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

/* The driver: no context has been made on the device. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  return *flags = 0, *active = 0, device;
}
