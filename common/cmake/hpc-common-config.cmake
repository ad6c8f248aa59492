# What an operator package gets from find_package(hpc-common): a CUDA compiler, the headers it needs at paths that stay
# the same from one isolated build environment to the next, and hpc_add_extension.
#
# Found through scikit-build-core's entry point `cmake.root` where hpc-common is installed, and through
# hpc-common_ROOT in the development build of the whole workspace.

set(HPC_COMMON_CMAKE_DIR "${CMAKE_CURRENT_LIST_DIR}")
set(HPC_COMMON_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include")
list(APPEND CMAKE_MODULE_PATH "${HPC_COMMON_CMAKE_DIR}")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)

include(HpcDependencies)
if(NOT HPC_COMMON_HOST_ONLY)
  include(HpcCuda)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
include(HpcExtension)
