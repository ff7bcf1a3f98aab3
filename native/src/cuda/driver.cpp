#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <utility>

namespace forebay::cuda {

namespace {

constexpr int kOldest = 12000;
constexpr int kBatch12 = 12080;
constexpr int kBatch13 = 13000;

using GetAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);

void* open_library() {
  for (const char* name : {"libcuda.so.1", "libcuda.so"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw SettingsError(
      "there is no NVIDIA driver here (libcuda.so.1 was not found): choose cpu instead of cuda, "
      "install the driver, or start the container with access to the GPU");
}

// Fills entries of the table by the name and version under which the driver knows them.
class Loader {
 public:
  Loader() : library_(open_library()) {
    get_ = reinterpret_cast<GetAddress>(dlsym(library_, "cuGetProcAddress_v2"));
    if (get_ == nullptr) {
      throw SettingsError("the NVIDIA driver is older than CUDA 12.0: install a newer one");
    }
  }

  template <typename Function>
  void optional(Function& entry, const char* name, int version) const {
    void* found = nullptr;
    int status = 0;
    if (get_(name, &found, version, 0, &status) != kSuccess) found = nullptr;
    entry = reinterpret_cast<Function>(found);
  }

  template <typename Function>
  void required(Function& entry, const char* name) const {
    optional(entry, name, kOldest);
    if (entry == nullptr) {
      throw SettingsError(std::string("the NVIDIA driver does not have ") + name +
                          ": install one of CUDA 12.0 or newer");
    }
  }

 private:
  void* library_;
  GetAddress get_ = nullptr;
};

}  // namespace

Driver::Driver() {
  const Loader load;
  load.required(init, "cuInit");
  load.required(driver_version, "cuDriverGetVersion");
  load.required(error_name, "cuGetErrorName");
  load.required(error_text, "cuGetErrorString");
  load.required(device_count, "cuDeviceGetCount");
  load.required(device, "cuDeviceGet");
  load.required(device_name, "cuDeviceGetName");
  load.required(device_memory, "cuDeviceTotalMem");
  load.required(device_attribute, "cuDeviceGetAttribute");
  load.required(retain_context, "cuDevicePrimaryCtxRetain");
  load.required(release_context, "cuDevicePrimaryCtxRelease");
  load.required(current_context, "cuCtxGetCurrent");
  load.required(set_context, "cuCtxSetCurrent");
  load.required(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  load.required(priority_range, "cuCtxGetStreamPriorityRange");
  load.required(create_stream, "cuStreamCreateWithPriority");
  load.required(destroy_stream, "cuStreamDestroy");
  load.required(create_event, "cuEventCreate");
  load.required(destroy_event, "cuEventDestroy");
  load.required(record_event, "cuEventRecord");
  load.required(query_event, "cuEventQuery");
  load.required(synchronize_event, "cuEventSynchronize");
  load.required(elapsed_ms, "cuEventElapsedTime");
  load.required(wait_event, "cuStreamWaitEvent");
  load.required(wait_value, "cuStreamWaitValue32");
  load.required(copy, "cuMemcpyAsync");
  load.required(copy_rows, "cuMemcpy2DAsync");
  load.required(copy_slices, "cuMemcpy3DAsync");
  load.required(address_range, "cuMemGetAddressRange");
  load.required(allocate_host, "cuMemHostAlloc");
  load.required(free_host, "cuMemFreeHost");
  load.required(register_host, "cuMemHostRegister");
  load.required(unregister_host, "cuMemHostUnregister");
  const Result started = init(0);
  if (started != kSuccess) {
    throw SettingsError(describe("the NVIDIA driver does not start", started) +
                        ": look at nvidia-smi, and at whether the container sees the GPU");
  }
  check("asking for the driver's version", driver_version(&version));
  // The same name, with one argument less from CUDA 13 on.
  if (version >= kBatch13) {
    load.optional(copy_batch, "cuMemcpyBatchAsync", kBatch13);
  } else if (version >= kBatch12) {
    load.optional(copy_batch_12, "cuMemcpyBatchAsync", kBatch12);
  }
}

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

std::string Driver::describe(const char* what, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  error_name(result, &name);
  error_text(result, &text);
  return std::string(what) + ": " + (name == nullptr ? std::to_string(result) : name) + ", " +
         (text == nullptr ? "unknown" : text);
}

int device_count() {
  int count = 0;
  const Driver& driver = Driver::get();
  const Result counted = driver.device_count(&count);
  if (counted == kNotInitialized) {
    throw BackendError(
        "this process was forked from one that had started CUDA, and cannot use it: start it by "
        "spawn (multiprocessing.get_context(\"spawn\"))");
  }
  driver.check("counting devices", counted);
  return count;
}

namespace {

Device device_at(int index) {
  const Driver& driver = Driver::get();
  const int count = device_count();
  if (index < 0 || index >= count) {
    throw SettingsError("there is no CUDA device " + std::to_string(index) + ": this process sees " +
                        std::to_string(count) + ", counted from 0 (CUDA_VISIBLE_DEVICES hides some)");
  }
  Device device = 0;
  driver.check("opening the device", driver.device(&device, index));
  return device;
}

}  // namespace

DeviceFacts facts_of(int index) {
  const Driver& driver = Driver::get();
  const Device device = device_at(index);
  DeviceFacts facts;
  char name[256] = {};
  driver.check("asking for the device's name", driver.device_name(name, sizeof(name), device));
  facts.name = name;
  driver.check("asking for the device's memory", driver.device_memory(&facts.memory_bytes, device));
  driver.check("asking for the device's copy engines",
               driver.device_attribute(&facts.copy_engines, kAsyncEngineCount, device));
  // Unknown to drivers before 12.2.
  if (driver.device_attribute(&facts.numa_node, kHostNumaId, device) != kSuccess) {
    facts.numa_node = -1;
  }
  return facts;
}

DeviceContext::DeviceContext(int index) : device_(device_at(index)) {
  const Driver& driver = Driver::get();
  driver.check("opening the device's context", driver.retain_context(&context_, device_));
}

DeviceContext::~DeviceContext() { Driver::get().release_context(device_); }

Result DeviceContext::enter() const {
  const Driver& driver = Driver::get();
  const Result entered = driver.set_context(context_);
  if (entered != kSuccess) return entered;
  int mode = kCaptureRelaxed;
  return driver.exchange_capture_mode(&mode);
}

DeviceContext::Scope::Scope(const DeviceContext& device) {
  const Driver& driver = Driver::get();
  if (driver.current_context(&before_) != kSuccess || before_ == device.context_) return;
  changed_ = driver.set_context(device.context_) == kSuccess;
}

DeviceContext::Scope::~Scope() {
  if (changed_) Driver::get().set_context(before_);
}

}  // namespace forebay::cuda
