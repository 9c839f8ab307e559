/* Stands in for the CUDA driver and runtime, so that torch believes that a GPU is present.
 *
 * Nothing is computed: the tests use tensors without memory. Calls that wait for the device are
 * counted, and so are calls that choose a device. Preload the library (LD_PRELOAD); a copy named
 * libcuda.so.1 takes the place of the driver's library.
 */
#include <stddef.h>
#include <string.h>

#include "driver_types.h"

/* counters that tests read with ctypes */
int stub_device_waits, stub_stream_waits, stub_event_waits, stub_last_device = -1;

static long next_handle = 4096;

#define NOTHING(name) int name(void) { return 0; }

int cudaGetDeviceCount(int *count) { *count = 2; return 0; }
int cudaGetDevice(int *device) { *device = stub_last_device < 0 ? 0 : stub_last_device; return 0; }
int cudaSetDevice(int device) { stub_last_device = device; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
  strncpy(text, "0000:00:00.0", length);
  return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->totalGlobalMem = 141UL << 30;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  return 0;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) {
  return cudaGetDeviceProperties(p, device);
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  *stream = (void *)next_handle++;
  return 0;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)next_handle++; return 0; }
int cudaDeviceSynchronize(void) { stub_device_waits++; return 0; }
int cudaStreamSynchronize(void *stream) { stub_stream_waits++; return 0; }
int cudaEventSynchronize(void *event) { stub_event_waits++; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id) *id = 0;
  return 0;
}
/* Triton asks for the compute capability (attributes 75 and 76) to choose its target. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 10 ? 32 : 0;
  return 0;
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 0;
  return 0;
}

NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError) NOTHING(cudaStreamDestroy)
NOTHING(cudaEventRecord) NOTHING(cudaEventRecordWithFlags) NOTHING(cudaEventDestroy)
NOTHING(cudaEventQuery) NOTHING(cudaStreamWaitEvent) NOTHING(cudaStreamQuery)
NOTHING(cudaThreadExchangeStreamCaptureMode) NOTHING(cudaHostRegister) NOTHING(cudaHostUnregister)
NOTHING(cuInit) NOTHING(cuCtxGetCurrent) NOTHING(cuCtxSetCurrent) NOTHING(cuDeviceGet)
NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuLaunchKernel) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2) NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad) NOTHING(cuModuleLoadData) NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute) NOTHING(cuTensorMapEncodeTiled)
