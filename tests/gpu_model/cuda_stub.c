/* Stands in for the CUDA driver and runtime, so that torch believes that a GPU is present.
 *
 * Nothing is computed: most tests use tensors without memory. Memory of the device is memory of the
 * host, and copies between both are made at once. Calls that wait for the device are counted, and so
 * are copies and calls that choose a device. Preload the library (LD_PRELOAD); a copy named
 * libcuda.so.1 takes the place of the driver's library.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "driver_types.h"

/* counters that tests read with ctypes */
int stub_device_waits, stub_stream_waits, stub_event_waits;
/* how often the stream of the kernels (0) was told to wait for an event */
int stub_waits_of_stream_0;
/* how often a thread has chosen GPU 0, where each thread begins */
int stub_choices_of_device_0;
/* a test sets it: the kernels submitted so far are not done */
int stub_is_busy;

/* copies, and those of them from or to pageable host memory, or on the stream of the kernels (0) */
int stub_copies, stub_pageable_copies, stub_copies_on_stream_0;

/* page-locked host memory: allocated once per size and kept by torch, so a short list is enough */
enum { MOST_ALLOCATIONS = 1024 };
static struct { char *begin; size_t bytes; } page_locked[MOST_ALLOCATIONS];
static int page_locked_count;

static _Thread_local int current_device;
static long next_handle = 4096;

#define NOTHING(name) int name(void) { return 0; }

/* first digit of the compute capability: 8 for an A100, 9 for an H100 */
static int compute_capability(void) {
  const char *wanted = getenv("FAKE_CUDA_CAPABILITY");
  return wanted ? atoi(wanted) : 9;
}

int cudaGetDeviceCount(int *count) { *count = 2; return 0; }
int cudaGetDevice(int *device) { *device = current_device; return 0; }
int cudaSetDevice(int device) {
  current_device = device;
  stub_choices_of_device_0 += device == 0;
  return 0;
}
int cudaEventQuery(void *event) { return stub_is_busy ? cudaErrorNotReady : 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  stub_waits_of_stream_0 += stream == 0;
  return 0;
}
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
  p->major = compute_capability();
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
static void *allocate(size_t bytes) { return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }
int cudaMalloc(void **pointer, size_t bytes) { *pointer = allocate(bytes); return 0; }
int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  if (page_locked_count == MOST_ALLOCATIONS) abort();
  *pointer = allocate(bytes);
  page_locked[page_locked_count].begin = *pointer;
  page_locked[page_locked_count++].bytes = bytes;
  return 0;
}
static int is_page_locked(const void *pointer) {
  for (int i = 0; i < page_locked_count; i++) {
    ptrdiff_t offset = (const char *)pointer - page_locked[i].begin;
    if (offset >= 0 && (size_t)offset < page_locked[i].bytes) return 1;
  }
  return 0;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = is_page_locked(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, void *stream) {
  stub_copies++;
  stub_copies_on_stream_0 += stream == 0;
  if (kind == cudaMemcpyHostToDevice) stub_pageable_copies += !is_page_locked(from);
  if (kind == cudaMemcpyDeviceToHost) stub_pageable_copies += !is_page_locked(to);
  memcpy(to, from, bytes);
  return 0;
}
/* memory of the program that is page-locked now, in bytes */
int stub_registered_bytes;
static size_t last_registered;
int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  stub_registered_bytes += last_registered = bytes;
  return 0;
}
int cudaHostUnregister(void *pointer) { stub_registered_bytes -= last_registered; return 0; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = 141UL << 30; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id) *id = 0;
  return 0;
}
/* Triton asks for the compute capability (attributes 75 and 76) to choose its target. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? compute_capability() : attribute == 10 ? 32 : 0;
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
NOTHING(cudaStreamQuery)
NOTHING(cudaThreadExchangeStreamCaptureMode)
NOTHING(cuInit) NOTHING(cuCtxGetCurrent) NOTHING(cuCtxSetCurrent) NOTHING(cuDeviceGet)
NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuLaunchKernel) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2) NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad) NOTHING(cuModuleLoadData) NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute) NOTHING(cuTensorMapEncodeTiled)
