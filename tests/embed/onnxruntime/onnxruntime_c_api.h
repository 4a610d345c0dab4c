/* The part of ONNX Runtime's C interface that cpp/examples/onnxruntime uses, for the tests: no
 * package of PyPI has the header, and nothing is vendored here. The interface is binary-stable:
 * functions keep their places in the table, new ones come at the end. Where the real header is
 * installed, ONNXRUNTIME_INCLUDE_DIR names its folder.
 */
#ifndef ANYFLASH_TESTS_EMBED_ONNXRUNTIME_C_API_H_
#define ANYFLASH_TESTS_EMBED_ONNXRUNTIME_C_API_H_

#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 16

typedef struct OrtStatus OrtStatus;
typedef OrtStatus* OrtStatusPtr;
typedef struct OrtValue OrtValue;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtCustomOp OrtCustomOp;

typedef enum OrtErrorCode { ORT_OK, ORT_FAIL, ORT_INVALID_ARGUMENT } OrtErrorCode;
typedef enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10
} ONNXTensorElementDataType;
typedef enum OrtMemType { OrtMemTypeDefault = 0 } OrtMemType;
typedef enum OrtCustomOpInputOutputCharacteristic {
  INPUT_OUTPUT_REQUIRED,
  INPUT_OUTPUT_OPTIONAL
} OrtCustomOpInputOutputCharacteristic;

/* By place; what is not used has no name. */
typedef struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message);
  void* slots_1[25];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  void* slots_29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);
  void* slots_52[9];
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count);
  void* slots_63[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
  void* slots_66[19];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name,
                                             float* out);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo* info, const char* name,
                                             int64_t* out);
  void* slots_87[1];
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext* context, size_t* out);
  void* slots_89[1];
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index,
                                       const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index,
                                        const int64_t* shape, size_t rank, OrtValue** out);
  void* slots_92[1];
  void (*ReleaseStatus)(OrtStatus* status);
  void* slots_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

struct OrtCustomOp {
  uint32_t version;
  void* slot_0;
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void* slot_7;
  void (*KernelDestroy)(void* kernel);
  OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op,
                                                                 size_t index);
  OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op,
                                                                  size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  void* slots_12[4];
  OrtStatusPtr (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api,
                                 const OrtKernelInfo* info, void** kernel);
  OrtStatusPtr (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  void* slots_18[7];
};

#endif /* ANYFLASH_TESTS_EMBED_ONNXRUNTIME_C_API_H_ */
