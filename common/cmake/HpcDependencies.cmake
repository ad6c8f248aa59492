# Stages what extensions include below HPC_DEPS_DIR, inside the build directory.
#
# An isolated build environment has another path at every build. If its paths stood in the compile commands, every edit
# would rebuild everything; with staged copies and links the commands stay the same, and ninja compiles only what an edit
# touches. hpc-common's headers are copied by content, so that a rebuilt hpc-common with the same headers touches nothing.

set(HPC_DEPS_DIR "${CMAKE_BINARY_DIR}/deps")
file(MAKE_DIRECTORY "${HPC_DEPS_DIR}")

# Points the link HPC_DEPS_DIR/<name> at <target>.
function(hpc_link_dependency name target)
  file(REMOVE "${HPC_DEPS_DIR}/${name}")
  file(CREATE_LINK "${target}" "${HPC_DEPS_DIR}/${name}" SYMBOLIC)
endfunction()

# Where the interpreter of this build finds the package <module>, without importing it.
function(hpc_find_python_package module result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('${module}'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${path}" PARENT_SCOPE)
endfunction()

function(hpc_stage_headers)
  file(GLOB_RECURSE headers RELATIVE "${HPC_COMMON_INCLUDE_DIR}" CONFIGURE_DEPENDS "${HPC_COMMON_INCLUDE_DIR}/*")
  foreach(header IN LISTS headers)
    configure_file("${HPC_COMMON_INCLUDE_DIR}/${header}" "${HPC_DEPS_DIR}/include/${header}" COPYONLY)
  endforeach()
endfunction()

hpc_stage_headers()

hpc_find_python_package(nanobind HPC_NANOBIND_DIR)
if(NOT HPC_NANOBIND_DIR)
  message(FATAL_ERROR "hpc-common: nanobind is not installed for ${Python_EXECUTABLE}")
endif()
# nanobind resolves links in its own path, so it is copied (times kept: an unchanged copy rebuilds nothing).
file(COPY "${HPC_NANOBIND_DIR}" DESTINATION "${HPC_DEPS_DIR}")
find_package(nanobind CONFIG REQUIRED PATHS "${HPC_DEPS_DIR}/nanobind/cmake" NO_DEFAULT_PATH)

# CuTe and CUTLASS headers, from the wheel nvidia-cutlass.
hpc_find_python_package(cutlass_library HPC_CUTLASS_PACKAGE)
if(HPC_CUTLASS_PACKAGE)
  hpc_link_dependency(cutlass "${HPC_CUTLASS_PACKAGE}/source/include")
  set(HPC_CUTLASS_INCLUDE_DIR "${HPC_DEPS_DIR}/cutlass")
endif()
