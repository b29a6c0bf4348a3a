// A CUDA driver that launches nothing and writes every call as one line of JSON to $FAKE_DRIVER_LOG.
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

template <class... Values>
static CUresult log(const char *format, Values... values) {
  FILE *file = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  fprintf(file, format, values...);
  fputc('\n', file);
  fclose(file);
  return CUDA_SUCCESS;
}

static CUcontext current = (CUcontext)0xbeef;

extern "C" {
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)(0x100ull + device); return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult status, const char **name) {
  *name = status == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (getenv("FAKE_DRIVER_REFUSES")) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = (CUmodule)0x200;
  return log("{\"call\": \"load\", \"elf\": %d}", !memcmp(image, "\177ELF", 4));
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = (CUfunction)0x300;
  return log("{\"call\": \"function\", \"name\": \"%s\"}", name);
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  return log("{\"call\": \"attribute\", \"attribute\": %d, \"value\": %d}", (int)attribute, value);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *size,
                                const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *step, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  if ((size_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
  memcpy(map, &address, sizeof address);
  return log("{\"call\": \"encode\", \"map_aligned\": %d, \"type\": %d, \"rank\": %u, \"address\": %zu, \"size\": [%zu, %zu], "
             "\"stride\": [%zu], \"box\": [%u, %u], \"step\": [%u, %u], \"modes\": [%d, %d, %d, %d]}",
             (int)((size_t)map % 64 == 0), (int)type, rank, (size_t)address, (size_t)size[0], (size_t)size[1], (size_t)stride[0], box[0],
             box[1], step[0], step[1], (int)interleave, (int)swizzle, (int)l2, (int)fill);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction, void **params, void **) {
  char attributes[200] = "";
  for (unsigned i = 0; i < c->numAttrs; ++i)
    snprintf(attributes + strlen(attributes), 60, "%s[%d, %u]", i ? ", " : "", (int)c->attrs[i].id, c->attrs[i].value.clusterDim.x);
  char arguments[200] = "";
  const char *kinds = getenv("FAKE_DRIVER_PARAMS");  // p pointer, i int, f float, t descriptor (its first word is the address)
  for (int i = 0; kinds[i]; ++i) {
    char text[40];
    if (kinds[i] == 'f') snprintf(text, 40, "%g", *(float *)params[i]);
    else snprintf(text, 40, "%zu", kinds[i] == 'i' ? (size_t)*(int *)params[i] : *(size_t *)params[i]);
    snprintf(arguments + strlen(arguments), 44, "%s%s", i ? ", " : "", text);
  }
  return log("{\"call\": \"launch\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %zu, "
             "\"context\": %zu, \"attributes\": [%s], \"params\": [%s]}", c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
             c->blockDimZ, c->sharedMemBytes, (size_t)c->hStream, (size_t)current, attributes, arguments);
}
}
