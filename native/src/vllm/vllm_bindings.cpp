// `forebay/_native.pyi` says what each call does.
#include "vllm/vllm_bindings.hpp"

#include "directory/python_arrays.hpp"
#include "vllm/free_queue.hpp"
#include "vllm/slot_books.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

// What `of` says of each block.
template <typename Result, typename Of>
nb::object of_each(const SlotBooks& self, nb::handle blocks, Of of) {
  const IdsArgument given(blocks, "blocks");
  check_blocks(given.values(), self.max_blocks());
  Result result(given.values().size());
  auto* out = result.data();
  for (const std::int32_t block : given.values()) *out++ = of(block);
  return result.array();
}

nb::object blocks_in(const SlotBooks& self, nb::handle slots) {
  const IdsArgument given(slots, "slots");
  check_blocks(given.values(), self.slots());
  std::vector<std::int32_t> found;
  std::vector<bool> seen(static_cast<std::size_t>(self.slots()));
  for (const std::int32_t slot : given.values()) {
    if (self.block_in(slot) >= 0 && !seen[slot]) found.push_back(self.block_in(slot));
    seen[slot] = true;
  }
  return ids_of(found);
}

nb::tuple along(const SlotBooks& self, nb::handle path) {
  const IdsArgument given(path, "blocks");
  check_blocks(given.values(), self.max_blocks());
  std::size_t here = 0, leading = 0, leased = 0, passed = 0;
  for (const std::int32_t block : given.values()) {
    if (self.slot_of(block) >= 0) {
      if (here == passed) ++leading;
      ++here;
      leased += self.leases(block) > 0;
    }
    ++passed;
  }
  return nb::make_tuple(here, leading, leased);
}

nb::object absent(const SlotBooks& self, nb::handle path) {
  const IdsArgument given(path, "blocks");
  check_blocks(given.values(), self.max_blocks());
  std::vector<std::int32_t> found;
  std::int32_t place = 0;
  for (const std::int32_t block : given.values()) {
    if (self.slot_of(block) < 0) found.push_back(place);
    ++place;
  }
  return ids_of(found);
}

nb::object all_blocks(const SlotBooks& self) {
  std::vector<std::int32_t> found;
  for (std::int32_t slot = 0; slot < self.slots(); ++slot) {
    if (self.block_in(slot) >= 0) found.push_back(self.block_in(slot));
  }
  return ids_of(found);
}

void bind_looks(nb::class_<SlotBooks>& books) {
  books
      .def("slot_of",
           [](const SlotBooks& self, nb::handle blocks) {
             return of_each<IdsResult>(self, blocks, [&](auto b) { return self.slot_of(b); });
           })
      .def("state",
           [](const SlotBooks& self, nb::handle blocks) {
             return of_each<StatesResult>(self, blocks, [&](auto b) {
               return static_cast<std::int8_t>(self.state_of(b));
             });
           })
      .def("busy",
           [](const SlotBooks& self, nb::handle blocks) {
             return of_each<FlagsResult>(self, blocks, [&](auto b) { return self.busy(b); });
           })
      .def("leases",
           [](const SlotBooks& self, nb::handle blocks) {
             return of_each<IdsResult>(self, blocks, [&](auto b) { return self.leases(b); });
           })
      .def("asked",
           [](const SlotBooks& self, nb::handle blocks) {
             return of_each<FlagsResult>(self, blocks, [&](auto b) { return self.asked(b); });
           })
      .def("along", &along)
      .def("absent", &absent)
      .def("blocks_in", &blocks_in)
      .def("all_blocks", &all_blocks)
      .def("in_state", &SlotBooks::in_state)
      .def_prop_ro("known", &SlotBooks::known)
      .def_prop_ro("leased_here", &SlotBooks::leased_here)
      .def_prop_ro("wanted_here", &SlotBooks::wanted_here)
      .def_prop_ro("prefetch_leased", &SlotBooks::prefetch_leased);
}

void bind_changes(nb::class_<SlotBooks>& books) {
  books
      .def("settle_in",
           [](SlotBooks& self, nb::handle blocks, nb::handle slots, std::int64_t state) {
             self.settle_in(IdsArgument(blocks, "blocks").values(),
                            IdsArgument(slots, "slots").values(), state);
           })
      .def("leave",
           [](SlotBooks& self, nb::handle blocks) {
             self.leave(IdsArgument(blocks, "blocks").values());
           })
      .def("move",
           [](SlotBooks& self, nb::handle blocks, std::int64_t state) {
             return ids_of(self.move(IdsArgument(blocks, "blocks").values(), state));
           })
      .def("relocate", &SlotBooks::relocate)
      .def("quarantine", &SlotBooks::quarantine)
      .def("lease",
           [](SlotBooks& self, nb::handle blocks, bool prefetch) {
             self.lease(IdsArgument(blocks, "blocks").values(), prefetch);
           })
      .def("release",
           [](SlotBooks& self, nb::handle blocks, bool prefetch) {
             return ids_of(self.release(IdsArgument(blocks, "blocks").values(), prefetch));
           })
      .def("promote",
           [](SlotBooks& self, nb::handle blocks) {
             self.promote(IdsArgument(blocks, "blocks").values());
           })
      .def("want",
           [](SlotBooks& self, nb::handle blocks, bool asked) {
             self.want(IdsArgument(blocks, "blocks").values(), asked);
           })
      .def("unwant", [](SlotBooks& self, nb::handle blocks, bool asked) {
        self.unwant(IdsArgument(blocks, "blocks").values(), asked);
      });
}

}  // namespace

void bind_vllm(nb::module_& module) {
  nb::class_<SlotBooks> books(module, "SlotBooks");
  books.def(nb::init<std::int64_t, std::int64_t>(), nb::arg("max_blocks"), nb::arg("slots"));
  bind_looks(books);
  bind_changes(books);
  nb::class_<FreeQueue>(module, "FreeQueue")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("queue"), nb::arg("blocks"))
      .def("first",
           [](const FreeQueue& self, std::int64_t count) { return ids_of(self.first(count)); })
      .def("spare", &FreeQueue::spare, nb::arg("books"), nb::arg("count"), nb::arg("most"),
           nb::arg("wanted_too"))
      .def("make_way", &FreeQueue::make_way, nb::arg("books"), nb::arg("count"), nb::arg("most"))
      .def("guard", &FreeQueue::guard, nb::arg("books"), nb::arg("count"))
      .def("ids", &FreeQueue::ids)
      .def("with_ids", [](const FreeQueue& self, nb::handle ids) {
        return self.with_ids(IdsArgument(ids, "ids").values());
      });
}

}  // namespace forebay
