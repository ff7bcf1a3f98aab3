// The Python face. Only here are Python objects touched, and only on the caller's thread.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>

#include "transfer/backend_sim.hpp"
#include "transfer/core.hpp"
#include "cuda/cuda_backend.hpp"
#include "cuda/cuda_bindings.hpp"
#include "directory/column_bindings.hpp"
#include "directory/directory_bindings.hpp"
#include "vllm/vllm_bindings.hpp"

namespace nb = nanobind;

namespace {

using namespace forebay;

template <typename T>
using Ids = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FragmentTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

template <typename T>
std::span<const T> as_span(const Ids<T>& ids) {
  return {ids.data(), ids.size()};
}

void raise_as(const char* name, const std::string& message) {
  const nb::object type = nb::module_::import_("forebay.errors").attr(name);
  PyErr_SetString(type.ptr(), message.c_str());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const SettingsError& error) {
    raise_as("SettingsError", error.what());
  } catch (const ParentMissingError& error) {
    raise_as("ParentMissingError", error.what());
  } catch (const NotLeafError& error) {
    raise_as("NotLeafError", error.what());
  } catch (const ProtocolError& error) {
    raise_as("ProtocolError", error.what());
  } catch (const BackendError& error) {
    raise_as("DeviceError", error.what());
  }
}

PoolLayout make_pool(std::uint64_t base_address, std::int64_t slots,
                     const std::vector<FragmentTuple>& fragments, std::int64_t seam_bytes) {
  std::vector<Fragment> parts;
  for (const auto& [offset, stride, bytes] : fragments) parts.push_back({offset, stride, bytes});
  return PoolLayout(base_address, slots, std::move(parts), seam_bytes);
}

template <typename T>
Ids<T> array_of(nb::handle transfer, const char* name) {
  Ids<T> out;
  if (!nb::try_cast(transfer.attr(name), out, false)) {
    throw ProtocolError(std::string("a transfer's ") + name +
                        " must be a contiguous one-dimensional numpy array of int" +
                        std::to_string(8 * sizeof(T)));
  }
  return out;
}

Direction as_direction(int value) {
  if (value < 0 || value > 1) throw ProtocolError("a direction is LOAD or SAVE");
  return static_cast<Direction>(value);
}

TransferClass as_class(int value) {
  if (value < 0 || value > 2) throw ProtocolError("a transfer class is DEMAND, PREFETCH or SAVE");
  return static_cast<TransferClass>(value);
}

std::shared_ptr<Transfer> read_transfer(nb::handle from) {
  const Direction direction = as_direction(nb::cast<int>(from.attr("direction")));
  const TransferClass transfer_class = as_class(nb::cast<int>(from.attr("transfer_class")));
  const auto sources = array_of<std::int32_t>(from, "sources");
  const auto destinations = array_of<std::int32_t>(from, "destinations");
  const auto after_steps = array_of<std::int64_t>(from, "after_steps");
  return Core::make_transfer(
      nb::cast<std::int64_t>(from.attr("id")), direction, transfer_class,
      nb::cast<double>(from.attr("deadline_s")), as_span(sources), as_span(destinations),
      as_span(after_steps));
}

// Checksums of slots as kernels of the sim saw them, by ticket.
struct SimKernels {
  struct Result {
    std::mutex mutex;
    std::condition_variable ready;
    bool done = false;
    std::vector<std::uint64_t> values;
  };
  std::map<std::int64_t, std::shared_ptr<Result>> results;
  std::int64_t next = 1;
};

template <typename Visit>
void visit_block(const PoolLayout& pool, std::int32_t slot, Visit visit) {
  for (std::size_t f = 0; f < pool.fragments().size(); ++f) {
    const std::int64_t end = pool.fragment_end(f);
    const std::int64_t begin = end - pool.fragments()[f].bytes;
    visit(pool.address(slot, f, begin), static_cast<std::size_t>(end - begin));
  }
}

std::uint64_t checksum(const PoolLayout& pool, std::int32_t slot) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  visit_block(pool, slot, [&](const std::byte* at, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(at[i])) * 1099511628211ULL;
    }
  });
  return hash;
}

// The core and, for tests, what only the backends without a GPU have.
class PyCore {
 public:
  PyCore(const std::string& backend, const PoolLayout& device, const PoolLayout& host,
         const Settings& settings, const cuda::BackendSettings& cuda_settings,
         double link_bytes_per_s, std::uint64_t seed, double longest_delay_s) {
    if (!(link_bytes_per_s >= 0)) throw SettingsError("link_bytes_per_s must not be negative");
    std::unique_ptr<Backend> made;
    if (backend == "cpu") {
      made = hooked(std::make_unique<CpuBackend>(link_bytes_per_s));
    } else if (backend == "cuda") {
      made = hooked(std::make_unique<cuda::CudaBackend>(cuda_settings));
    } else if (backend == "sim") {
      auto sim = std::make_unique<SimBackend>(seed, longest_delay_s);
      sim_ = sim.get();
      made = hooked(std::move(sim));
    } else {
      throw SettingsError("there is no backend '" + backend + "': use 'cpu', 'cuda' or 'sim'");
    }
    core = std::make_unique<Core>(settings, device, host, std::move(made));
  }

  std::unique_ptr<Core> core;

  TestHooks& hooks() { return *hooks_; }
  SimBackend& sim() {
    if (sim_ == nullptr) throw ProtocolError("only the sim backend has compute streams");
    return *sim_;
  }

  void sim_fill(StreamHandle stream, const Ids<std::int32_t>& slots, int value) {
    sim().launch(stream, [this, slots = copied(slots), value] {
      for (const std::int32_t slot : slots) {
        visit_block(core->device(), slot, [value](std::byte* at, std::size_t bytes) {
          std::memset(at, value, bytes);
        });
      }
    });
  }

  std::int64_t sim_checksum(StreamHandle stream, const Ids<std::int32_t>& slots) {
    auto result = std::make_shared<SimKernels::Result>();
    sim().launch(stream, [this, slots = copied(slots), result] {
      const std::lock_guard lock(result->mutex);
      for (const std::int32_t slot : slots) {
        result->values.push_back(checksum(core->device(), slot));
      }
      result->done = true;
      result->ready.notify_all();
    });
    kernels_.results.emplace(kernels_.next, result);
    return kernels_.next++;
  }

  std::vector<std::uint64_t> sim_result(std::int64_t ticket, double timeout_s) {
    const auto at = kernels_.results.find(ticket);
    if (at == kernels_.results.end()) throw ProtocolError("there is no such checksum");
    const auto result = at->second;
    {
      const nb::gil_scoped_release released;
      std::unique_lock lock(result->mutex);
      result->ready.wait_for(lock, bounded(timeout_s), [&] { return result->done; });
    }
    const std::lock_guard lock(result->mutex);
    if (!result->done) throw ProtocolError("the checksum's stream did not reach it in time");
    kernels_.results.erase(ticket);
    return result->values;
  }

 private:
  std::vector<std::int32_t> copied(const Ids<std::int32_t>& slots) const {
    std::vector<std::int32_t> out(slots.data(), slots.data() + slots.size());
    for (const std::int32_t slot : out) {
      if (slot < 0 || slot >= core->device().slots()) throw ProtocolError("no such device slot");
    }
    return out;
  }

  template <typename Made>
  std::unique_ptr<Made> hooked(std::unique_ptr<Made> backend) {
    hooks_ = backend.get();
    return backend;
  }

  TestHooks* hooks_ = nullptr;
  SimBackend* sim_ = nullptr;
  SimKernels kernels_;
};

void submit(PyCore& self, const nb::sequence& transfers) {
  std::vector<std::shared_ptr<Transfer>> batch;
  for (nb::handle transfer : transfers) batch.push_back(read_transfer(transfer));
  self.core->submit(std::move(batch));
}

nb::tuple poll(PyCore& self) {
  Report report = self.core->poll();
  nb::list completions;
  for (const Completion& each : report.completions) {
    completions.append(nb::make_tuple(each.id, static_cast<int>(each.outcome), each.blocks_done,
                                      each.blocks_touched, each.bytes, each.started_s,
                                      each.finished_s, each.error, each.torn_from));
  }
  nb::list bands;
  for (const BandsIssued& each : report.bands) bands.append(nb::make_tuple(each.id, each.bands));
  nb::list issued;
  for (const std::int64_t id : report.issued) issued.append(id);
  return nb::make_tuple(nb::tuple(issued), nb::tuple(bands), completions, report.completed_step);
}

nb::tuple wait(PyCore& self, const Ids<std::int64_t>& ids, StreamHandle stream, double timeout_s,
               std::int64_t band) {
  WaitResult result{};
  {
    const nb::gil_scoped_release released;
    result = self.core->wait(as_span(ids), stream, timeout_s, band);
  }
  return nb::make_tuple(static_cast<int>(result.verdict), result.id);
}

nb::tuple windows(PyCore& self) {
  std::int64_t dropped = 0;
  const std::vector<WindowRecord> records = self.core->windows(&dropped);
  return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(records.data()),
                                  records.size() * sizeof(WindowRecord)),
                        dropped);
}

void make_core(PyCore* self, const std::string& backend, const PoolLayout& device,
               const PoolLayout& host, std::int64_t window_bytes, int lanes,
               double link_bytes_per_s, double window_timeout_s, std::int64_t most_transfers,
               std::int64_t window_records, std::uint64_t seed, double longest_delay_s,
               int device_index, double spin_s, bool timing, bool piece_by_piece) {
  const Settings settings{window_bytes, lanes, window_timeout_s, most_transfers, window_records};
  const cuda::BackendSettings cuda_settings{device_index, spin_s, timing, piece_by_piece};
  new (self) PyCore(backend, device, host, settings, cuda_settings, link_bytes_per_s, seed,
                    longest_delay_s);
}

void bind_pool(nb::module_& module) {
  nb::class_<PoolLayout>(module, "PoolLayout")
      .def(
          "__init__",
          [](PoolLayout* self, std::uint64_t base_address, std::int64_t slots,
             const std::vector<FragmentTuple>& fragments, std::int64_t seam_bytes) {
            new (self) PoolLayout(make_pool(base_address, slots, fragments, seam_bytes));
          },
          nb::arg("base_address"), nb::arg("slots"), nb::arg("fragments"),
          nb::arg("seam_bytes") = 0)
      .def_prop_ro("slots", &PoolLayout::slots)
      .def_prop_ro("block_bytes", &PoolLayout::block_bytes);
}

void bind_calls(nb::class_<PyCore>& core) {
  core.def("submit", &submit)
      .def("cancel",
           [](PyCore& self, const Ids<std::int64_t>& ids) { self.core->cancel(as_span(ids)); })
      .def("expedite",
           [](PyCore& self, const Ids<std::int64_t>& ids, int transfer_class, double deadline_s) {
             self.core->expedite(as_span(ids), as_class(transfer_class), deadline_s);
           })
      .def("use_bands",
           [](PyCore& self, const Ids<std::int64_t>& ids, const std::vector<std::int64_t>& ends) {
             self.core->use_bands(as_span(ids), ends);
           })
      .def("step_launched",
           [](PyCore& self, std::int64_t step, StreamHandle stream) {
             self.core->step_launched(step, stream);
           })
      .def("step_abandoned",
           [](PyCore& self, std::int64_t step) { self.core->step_abandoned(step); })
      .def("poll", &poll)
      .def("wait", &wait)
      .def("wait_news",
           [](PyCore& self, double timeout_s) {
             const nb::gil_scoped_release released;
             return self.core->wait_news(timeout_s);
           })
      .def("windows", &windows)
      .def("when",
           [](PyCore& self, std::uint64_t driver_event) -> nb::object {
             double at_s = 0;
             if (!self.core->backend().when(driver_event, at_s)) return nb::none();
             return nb::float_(at_s);
           })
      .def("close", [](PyCore& self, double timeout_s) {
        const nb::gil_scoped_release released;
        self.core->close(timeout_s);
      });
}

void bind_hooks(nb::class_<PyCore>& core) {
  core.def_prop_ro("events", [](PyCore& self) { return self.core->events(); })
      .def_prop_ro("events_in_use", [](PyCore& self) { return self.core->events_in_use(); })
      .def_prop_ro("live_transfers", [](PyCore& self) { return self.core->live_transfers(); })
      .def("hold_lane",
           [](PyCore& self, int direction, int lane) {
             self.hooks().hold_lane(as_direction(direction), lane);
           })
      .def("release_lane",
           [](PyCore& self, int direction, int lane) {
             self.hooks().release_lane(as_direction(direction), lane);
           })
      .def("fail_window",
           [](PyCore& self, int direction, int skip) {
             self.hooks().fail_window(as_direction(direction), skip);
           })
      .def("sim_stream", [](PyCore& self) { return self.sim().open_compute_stream(); })
      .def("hold_stream", [](PyCore& self, StreamHandle stream) { self.sim().hold(stream); })
      .def("release_stream", [](PyCore& self, StreamHandle stream) { self.sim().release(stream); })
      .def("sim_fill", &PyCore::sim_fill)
      .def("sim_checksum", &PyCore::sim_checksum)
      .def("sim_result", &PyCore::sim_result);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The native core: what moves blocks, and what is kept block by block.";
  nb::register_exception_translator(translate);
  bind_pool(module);
  nb::class_<PyCore> core(module, "Core");
  core.def("__init__", &make_core, nb::arg("backend"), nb::arg("device"), nb::arg("host"),
           nb::kw_only(), nb::arg("window_bytes"), nb::arg("lanes"), nb::arg("link_bytes_per_s"),
           nb::arg("window_timeout_s"), nb::arg("most_transfers"), nb::arg("window_records"),
           nb::arg("seed"), nb::arg("longest_delay_s"), nb::arg("device_index"),
           nb::arg("spin_s"), nb::arg("timing"), nb::arg("piece_by_piece"));
  bind_calls(core);
  bind_hooks(core);
  cuda::bind(module);
  bind_directory(module);
  bind_columns(module);
  bind_vllm(module);
  module.def("leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, nb::arg("on"));
}
