// NVIDIA's driver, found when the program runs: nothing of CUDA is needed to build, and a machine
// without it can import everything else.
//
// Types and constants are those of the driver's stable binary interface, under names of our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transfer/types.hpp"

namespace forebay::cuda {

using Result = int;
using Device = int;
using Address = unsigned long long;
using Context = struct ContextHandle*;
using Stream = struct StreamOpaque*;
using EventHandle = struct EventOpaque*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNotReady = 600;

inline constexpr unsigned kStreamNonBlocking = 0x1;
inline constexpr unsigned kEventDefault = 0x0;
inline constexpr unsigned kEventDisableTiming = 0x2;
inline constexpr unsigned kHostPortable = 0x1;
inline constexpr unsigned kWaitValueEqual = 0x1;
inline constexpr int kCaptureRelaxed = 2;

inline constexpr int kMaxPitch = 11;  // attributes of a device
inline constexpr int kAsyncEngineCount = 40;
inline constexpr int kHostNumaId = 134;

// Which accesses a copy of a batch is ordered with. `stream`: all work before it in its stream.
inline constexpr int kSourceOrderStream = 1;

struct Location {
  int type = 0;
  int id = 0;
};

struct CopyAttributes {
  int source_order = kSourceOrderStream;
  Location source{};
  Location destination{};
  unsigned flags = 0;
};

// Memory whose address says where it is.
inline constexpr int kUnifiedMemory = 4;

// `height` rows of `width` bytes, `pitch` bytes apart on each side.
struct CopyRows {
  std::size_t source_x = 0, source_y = 0;
  int source_type = kUnifiedMemory;
  const void* source_host = nullptr;
  Address source = 0;
  void* source_array = nullptr;
  std::size_t source_pitch = 0;
  std::size_t destination_x = 0, destination_y = 0;
  int destination_type = kUnifiedMemory;
  void* destination_host = nullptr;
  Address destination = 0;
  void* destination_array = nullptr;
  std::size_t destination_pitch = 0;
  std::size_t width = 0, height = 0;
};

// `depth` slices, of which the first `height` rows of `width` bytes are copied. A slice has so many rows
// on each side, `pitch` bytes apart.
struct CopySlices {
  std::size_t source_x = 0, source_y = 0, source_z = 0, source_level = 0;
  int source_type = kUnifiedMemory;
  const void* source_host = nullptr;
  Address source = 0;
  void* source_array = nullptr;
  void* source_reserved = nullptr;
  std::size_t source_pitch = 0, source_rows = 0;
  std::size_t destination_x = 0, destination_y = 0, destination_z = 0, destination_level = 0;
  int destination_type = kUnifiedMemory;
  void* destination_host = nullptr;
  Address destination = 0;
  void* destination_array = nullptr;
  void* destination_reserved = nullptr;
  std::size_t destination_pitch = 0, destination_rows = 0;
  std::size_t width = 0, height = 0, depth = 0;
};

// The calls we use. Those that may be null say so.
struct Driver {
  // Loads the driver once. Throws SettingsError where there is none, or one too old to use.
  static const Driver& get();

  int version = 0;  // 13000 is CUDA 13.0

  Result (*init)(unsigned) = nullptr;
  Result (*driver_version)(int*) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  Result (*error_text)(Result, const char**) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*device)(Device*, int) = nullptr;
  Result (*device_name)(char*, int, Device) = nullptr;
  Result (*device_memory)(std::size_t*, Device) = nullptr;
  Result (*device_attribute)(int*, int, Device) = nullptr;
  Result (*retain_context)(Context*, Device) = nullptr;
  Result (*release_context)(Device) = nullptr;
  Result (*current_context)(Context*) = nullptr;
  Result (*set_context)(Context) = nullptr;
  Result (*exchange_capture_mode)(int*) = nullptr;
  Result (*priority_range)(int*, int*) = nullptr;
  Result (*create_stream)(Stream*, unsigned, int) = nullptr;
  Result (*destroy_stream)(Stream) = nullptr;
  Result (*create_event)(EventHandle*, unsigned) = nullptr;
  Result (*destroy_event)(EventHandle) = nullptr;
  Result (*record_event)(EventHandle, Stream) = nullptr;
  Result (*query_event)(EventHandle) = nullptr;
  Result (*synchronize_event)(EventHandle) = nullptr;
  Result (*elapsed_ms)(float*, EventHandle, EventHandle) = nullptr;
  Result (*wait_event)(Stream, EventHandle, unsigned) = nullptr;
  Result (*wait_value)(Stream, Address, std::uint32_t, unsigned) = nullptr;
  Result (*copy)(Address, Address, std::size_t, Stream) = nullptr;
  Result (*copy_rows)(const CopyRows*, Stream) = nullptr;
  Result (*copy_slices)(const CopySlices*, Stream) = nullptr;
  Result (*address_range)(Address* begin, std::size_t* size, Address) = nullptr;
  Result (*allocate_host)(void**, std::size_t, unsigned) = nullptr;
  Result (*free_host)(void*) = nullptr;
  Result (*register_host)(void*, std::size_t, unsigned) = nullptr;
  Result (*unregister_host)(void*) = nullptr;

  // Many copies in one call. One of the two, or neither before CUDA 12.8.
  Result (*copy_batch)(Address*, Address*, std::size_t*, std::size_t, CopyAttributes*,
                       std::size_t*, std::size_t, Stream) = nullptr;
  Result (*copy_batch_12)(Address*, Address*, std::size_t*, std::size_t, CopyAttributes*,
                          std::size_t*, std::size_t, std::size_t*, Stream) = nullptr;

  // "what: name, text" of a result.
  std::string describe(const char* what, Result result) const;
  // Throws BackendError unless the result is success.
  void check(const char* what, Result result) const {
    if (result != kSuccess) throw BackendError(describe(what, result));
  }

 private:
  Driver();
};

// One device and its primary context, which the frameworks of the process use too.
class DeviceContext {
 public:
  // Throws SettingsError for a device that is not there.
  explicit DeviceContext(int index);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  // Makes it the current one of the calling thread, for good, whose calls do not break a capture of
  // a CUDA graph that another thread has begun: nothing of ours goes to a stream that is captured.
  Result enter() const;

  // Current within a scope; what was current before is so again afterwards. Where that fails, as on
  // a device that broke, the calls within say so: a thread of the core must not end by it.
  class Scope {
   public:
    explicit Scope(const DeviceContext& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Context before_ = nullptr;
    bool changed_ = false;
  };

 private:
  Device device_ = 0;
  Context context_ = nullptr;
};

// What the driver says of a device.
struct DeviceFacts {
  std::string name;
  std::size_t memory_bytes = 0;
  int copy_engines = 0;
  int numa_node = -1;  // of the host memory nearest to it; -1 where there is only one
};

// Devices there are. Throws SettingsError without a driver.
int device_count();
DeviceFacts facts_of(int index);

}  // namespace forebay::cuda
