// A driver without a device, for tests: libcuda.so.1 as far as the core calls it.
//
// Device memory is this process's memory, and a stream has done its work when the call returns. The
// environment says what goes wrong, and `fake_cuda_live` tells what was made and not given back.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kNoMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kIllegalAddress = 700;
constexpr Result kNotSupported = 801;
constexpr Result kWhileCapturing = 900;
constexpr Result kCaptured = 907;
constexpr int kGlobal = 0;
constexpr int kRelaxed = 2;

// Reads a whole number from the environment each time: a test may change it while it runs.
long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atol(value);
}

thread_local int capture_mode = kGlobal;
std::mutex mutex;
std::map<std::string, long> live;
std::atomic<long> registrations{0};
std::atomic<long> copies{0};

void count(const char* what, long by) {
  const std::lock_guard lock(mutex);
  live[what] += by;
}

// A fault of the device is for good: every later call reports it.
Result state() {
  const long good = setting("FAKE_CUDA_COPIES_UNTIL_FAULT", -1);
  return good >= 0 && copies > good ? kIllegalAddress : kSuccess;
}

Result init(unsigned) { return static_cast<Result>(setting("FAKE_CUDA_INIT", 0)); }
Result driver_version(int* version) {
  *version = static_cast<int>(setting("FAKE_CUDA_VERSION", 13000));
  return kSuccess;
}
Result error_name(Result result, const char** name) {
  *name = result == kNoMemory         ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : result == kCaptured       ? "CUDA_ERROR_CAPTURED_EVENT"
                                      : "CUDA_ERROR_NOT_SUPPORTED";
  return kSuccess;
}
Result error_text(Result, const char** text) {
  *text = "as the test asked";
  return kSuccess;
}
Result device_count(int* devices) {
  *devices = static_cast<int>(setting("FAKE_CUDA_DEVICES", 1));
  return setting("FAKE_CUDA_FORKED", 0) != 0 ? kNotInitialized : kSuccess;
}
Result device(int* device, int index) {
  *device = index;
  return kSuccess;
}
Result device_name(char* name, int length, int) {
  std::strncpy(name, "fake", static_cast<std::size_t>(length));
  return kSuccess;
}
Result device_memory(std::size_t* bytes, int) {
  *bytes = std::size_t{1} << 30;
  return kSuccess;
}
Result device_attribute(int* value, int which, int) {
  constexpr int kMaxPitch = 11;
  *value = which == kMaxPitch ? static_cast<int>(setting("FAKE_CUDA_MAX_PITCH", 1 << 30)) : 0;
  return kSuccess;
}

thread_local void* current = nullptr;
Result retain_context(void** context, int) {
  *context = &live;
  count("contexts", 1);
  return kSuccess;
}
Result release_context(int) {
  count("contexts", -1);
  return kSuccess;
}
Result current_context(void** context) {
  *context = current;
  return state();
}
Result set_context(void* context) {
  current = context;
  return state();
}

Result priority_range(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return kSuccess;
}
template <typename Handle>
Result make(Handle* handle, const char* what) {
  *handle = new char;
  count(what, 1);
  return state();
}
Result unmake(void* handle, const char* what) {
  delete static_cast<char*>(handle);
  count(what, -1);
  return state();
}
Result create_stream(void** stream, unsigned, int) { return make(stream, "streams"); }
Result destroy_stream(void* stream) { return unmake(stream, "streams"); }
Result create_event(void** event, unsigned) { return make(event, "events"); }
Result destroy_event(void* event) { return unmake(event, "events"); }
Result record_event(void*, void*) { return state(); }
Result query_event(void*) {
  return setting("FAKE_CUDA_CAPTURED", 0) != 0 ? kCaptured : state();
}
Result elapsed_ms(float* ms, void*, void*) {
  *ms = 0;
  return state();
}
Result wait_event(void*, void*, unsigned) { return state(); }
Result wait_value(void*, unsigned long long, std::uint32_t, unsigned) { return state(); }
Result copy(unsigned long long to, unsigned long long from, std::size_t bytes, void*) {
  ++copies;
  if (state() != kSuccess) return state();
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}
struct Rows {
  std::size_t from_x, from_y;
  int from_type;
  const void* from_host;
  unsigned long long from;
  void* from_array;
  std::size_t from_pitch;
  std::size_t to_x, to_y;
  int to_type;
  void* to_host;
  unsigned long long to;
  void* to_array;
  std::size_t to_pitch, width, height;
};
Result copy_rows(const Rows* rows, void* stream) {
  constexpr Result kInvalid = 1;
  if (rows->from_type != 4 || rows->to_type != 4) return kInvalid;
  if (rows->from_pitch < rows->width || rows->to_pitch < rows->width) return kInvalid;
  count("row copies", 1);
  for (std::size_t row = 0; row < rows->height; ++row) {
    const Result result = copy(rows->to + row * rows->to_pitch,
                               rows->from + row * rows->from_pitch, rows->width, stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}
struct Slices {
  std::size_t from_x, from_y, from_z, from_level;
  int from_type;
  const void* from_host;
  unsigned long long from;
  void* from_array;
  void* from_reserved;
  std::size_t from_pitch, from_rows;
  std::size_t to_x, to_y, to_z, to_level;
  int to_type;
  void* to_host;
  unsigned long long to;
  void* to_array;
  void* to_reserved;
  std::size_t to_pitch, to_rows, width, height, depth;
};
Result copy_slices(const Slices* slices, void* stream) {
  constexpr Result kInvalid = 1;
  const auto longest = static_cast<std::size_t>(setting("FAKE_CUDA_MAX_PITCH", 1 << 30));
  if (slices->from_type != 4 || slices->to_type != 4 || slices->height != 1) return kInvalid;
  if (slices->from_pitch < slices->width || slices->to_pitch < slices->width) return kInvalid;
  if (slices->from_pitch > longest || slices->to_pitch > longest) return kInvalid;
  if (slices->from_rows < 1 || slices->to_rows < 1) return kInvalid;
  count("slice copies", 1);
  for (std::size_t at = 0; at < slices->depth; ++at) {
    const Result result = copy(slices->to + at * slices->to_pitch * slices->to_rows,
                               slices->from + at * slices->from_pitch * slices->from_rows,
                               slices->width, stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}
Result copy_batch(unsigned long long* to, unsigned long long* from, std::size_t* bytes,
                  std::size_t count, void*, std::size_t*, std::size_t, void* stream) {
  for (std::size_t i = 0; i < count; ++i) {
    if (const Result result = copy(to[i], from[i], bytes[i], stream)) return result;
  }
  return kSuccess;
}
Result copy_batch_12(unsigned long long* to, unsigned long long* from, std::size_t* bytes,
                     std::size_t count, void* attributes, std::size_t* indices, std::size_t kinds,
                     std::size_t* failed, void* stream) {
  *failed = 0;
  return copy_batch(to, from, bytes, count, attributes, indices, kinds, stream);
}

Result allocate_host(void** memory, std::size_t bytes, unsigned) {
  if (setting("FAKE_CUDA_REFUSE_ALLOCATING", 0) != 0) return kNoMemory;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  count("allocations", 1);
  return kSuccess;
}
Result free_host(void* memory) {
  std::free(memory);
  count("allocations", -1);
  return kSuccess;
}
Result exchange_capture_mode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}
// Memory is allocated in pieces of so many bytes, or all in one.
Result address_range(std::uint64_t* begin, std::size_t* size, std::uint64_t at) {
  const auto bytes = static_cast<std::uint64_t>(setting("FAKE_CUDA_ALLOCATION_BYTES", 0));
  *begin = bytes == 0 ? 0 : at / bytes * bytes;
  *size = bytes == 0 ? ~std::size_t{0} : bytes;
  return kSuccess;
}
Result register_host(void*, std::size_t, unsigned) {
  // As while another thread captures a graph.
  if (setting("FAKE_CUDA_CAPTURING", 0) != 0 && capture_mode != kRelaxed) return kWhileCapturing;
  const long good = setting("FAKE_CUDA_GOOD_REGISTRATIONS", -1);
  if (good >= 0 && registrations >= good) return kNotSupported;
  ++registrations;
  count("registrations", 1);
  return kSuccess;
}
Result unregister_host(void*) {
  count("registrations", -1);
  return kSuccess;
}

const std::map<std::string, void*>& table() {
  const auto at = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> entries{
      {"cuInit", at(init)},
      {"cuDriverGetVersion", at(driver_version)},
      {"cuGetErrorName", at(error_name)},
      {"cuGetErrorString", at(error_text)},
      {"cuDeviceGetCount", at(device_count)},
      {"cuDeviceGet", at(device)},
      {"cuDeviceGetName", at(device_name)},
      {"cuDeviceTotalMem", at(device_memory)},
      {"cuDeviceGetAttribute", at(device_attribute)},
      {"cuDevicePrimaryCtxRetain", at(retain_context)},
      {"cuDevicePrimaryCtxRelease", at(release_context)},
      {"cuCtxGetCurrent", at(current_context)},
      {"cuCtxSetCurrent", at(set_context)},
      {"cuThreadExchangeStreamCaptureMode", at(exchange_capture_mode)},
      {"cuCtxGetStreamPriorityRange", at(priority_range)},
      {"cuStreamCreateWithPriority", at(create_stream)},
      {"cuStreamDestroy", at(destroy_stream)},
      {"cuEventCreate", at(create_event)},
      {"cuEventDestroy", at(destroy_event)},
      {"cuEventRecord", at(record_event)},
      {"cuEventQuery", at(query_event)},
      {"cuEventSynchronize", at(query_event)},
      {"cuEventElapsedTime", at(elapsed_ms)},
      {"cuStreamWaitEvent", at(wait_event)},
      {"cuStreamWaitValue32", at(wait_value)},
      {"cuMemcpyAsync", at(copy)},
      {"cuMemcpy2DAsync", at(copy_rows)},
      {"cuMemcpy3DAsync", at(copy_slices)},
      {"cuMemGetAddressRange", at(address_range)},
      {"cuMemHostAlloc", at(allocate_host)},
      {"cuMemFreeHost", at(free_host)},
      {"cuMemHostRegister", at(register_host)},
      {"cuMemHostUnregister", at(unregister_host)},
  };
  return entries;
}

}  // namespace

extern "C" {

// What of a kind ("events", "streams", "registrations", "allocations", "contexts") is alive.
long fake_cuda_live(const char* what) {
  const std::lock_guard lock(mutex);
  return live[what];
}

#ifndef FAKE_CUDA_ANCIENT
Result cuGetProcAddress_v2(const char* name, void** found, int version, std::uint64_t,
                           int* status) {
  *status = 0;
  *found = nullptr;
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0) {
    *found = version >= 13000 ? reinterpret_cast<void*>(copy_batch)
                              : reinterpret_cast<void*>(copy_batch_12);
    return kSuccess;
  }
  const char* missing = std::getenv("FAKE_CUDA_WITHOUT");
  const auto entry = table().find(name);
  if (entry == table().end() || (missing != nullptr && entry->first == missing)) return 500;
  *found = entry->second;
  return kSuccess;
}
#endif
}
