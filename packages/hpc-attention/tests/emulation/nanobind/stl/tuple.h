// Tuples need nothing beyond the stand-in's nanobind.h.
#pragma once
