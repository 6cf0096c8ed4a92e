/* The CUDA entry points that a host object of the CuTe DSL needs. None of them has a device behind
 * it: launches go to a callback, and kernels are known by their names. */
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define UNUSED __attribute__((unused))
#else
#define UNUSED
#endif

typedef int (*launch_callback)(void *config, const char *kernel, void **params);

static launch_callback callback;
static int64_t library[8];
static char names[64][4096];
static int name_count;

void emulator_set_callback(launch_callback f) { callback = f; }

int _cudaLibraryLoadData(void **lib, UNUSED const void *code, UNUSED void *a, UNUSED void *b,
                         UNUSED unsigned n, UNUSED void *c, UNUSED void *d, UNUSED unsigned m) {
  *lib = library;
  return 0;
}

int _cudaLibraryGetKernel(void **kernel, UNUSED void *lib, const char *name) {
  char *slot = names[name_count++ % 64];
  size_t i = 0;
  for (; name[i] && i + 1 < sizeof names[0]; ++i) slot[i] = name[i];
  slot[i] = 0;
  *kernel = slot;
  return 0;
}

int _cudaLaunchKernelEx(void *config, const void *kernel, void **params) {
  return callback(config, (const char *)kernel, params);
}

int _cudaFuncSetAttribute(UNUSED const void *f, UNUSED int a, UNUSED int v) { return 0; }
int _cudaKernelSetAttributeForDevice(UNUSED void *k, UNUSED int a, UNUSED int v, UNUSED int d) {
  return 0;
}
int _cudaGetDevice(int *d) { *d = 0; return 0; }
int _cudaSetDevice(UNUSED int d) { return 0; }
int _cudaGetDeviceCount(int *n) { *n = 1; return 0; }
/* 227 KiB: the largest shared memory per block of sm_90 and sm_100. */
int _cudaDeviceGetAttribute(int *v, UNUSED int a, UNUSED int d) { *v = 232448; return 0; }
int _cuKernelGetAttribute(int *v, UNUSED int a, UNUSED void *k, UNUSED int d) { *v = 0; return 0; }
