# Chooses the CUDA compiler: $CUDACXX, else the system's nvcc (on PATH or below $CUDA_HOME) where it is 12.8 or newer,
# else the one of the wheels nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm. HPC_CUDA=wheel in the environment
# skips the system's. hpc-common itself has no device code and does not include this unless asked to.

set(HPC_CUDA_MINIMUM 12.8)
set(HPC_CUDA_BELOW 14)
set(HPC_GCC_MINIMUM 11)

function(hpc_nvcc_version nvcc result)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE output ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" matched "${output}")
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS ${HPC_GCC_MINIMUM})
  message(FATAL_ERROR "hpc-common: expected g++ ${HPC_GCC_MINIMUM} or newer, got ${CMAKE_CXX_COMPILER_VERSION}")
endif()

set(hpc_nvcc "")
if(NOT "$ENV{HPC_CUDA}" STREQUAL "wheel")
  if(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(hpc_nvcc "$ENV{CUDACXX}")
  else()
    find_program(HPC_SYSTEM_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH NO_CACHE)
    if(HPC_SYSTEM_NVCC)
      hpc_nvcc_version("${HPC_SYSTEM_NVCC}" hpc_nvcc_found)
      if(hpc_nvcc_found VERSION_GREATER_EQUAL ${HPC_CUDA_MINIMUM} AND hpc_nvcc_found VERSION_LESS ${HPC_CUDA_BELOW})
        set(hpc_nvcc "${HPC_SYSTEM_NVCC}")
      else()
        message(STATUS "hpc-common: ${HPC_SYSTEM_NVCC} is ${hpc_nvcc_found}; using the compiler wheels")
      endif()
    endif()
  endif()
endif()

if(NOT hpc_nvcc)
  hpc_find_python_package(nvidia hpc_nvidia)
  if(NOT EXISTS "${hpc_nvidia}/cu13/bin/nvcc")
    message(FATAL_ERROR "hpc-common: no nvcc of ${HPC_CUDA_MINIMUM} or newer on PATH, and the wheels nvidia-cuda-nvcc, "
      "-crt, -runtime, -cccl and nvidia-nvvm are not installed for ${Python_EXECUTABLE}")
  endif()
  hpc_link_dependency(cuda "${hpc_nvidia}/cu13")
  set(hpc_nvcc "${HPC_DEPS_DIR}/cuda/bin/nvcc")
  # The wheels keep libraries in lib, where nvcc expects lib64.
  set(CMAKE_CUDA_FLAGS_INIT "-L${HPC_DEPS_DIR}/cuda/lib")
  set(CUDAToolkit_ROOT "${HPC_DEPS_DIR}/cuda")
endif()

hpc_nvcc_version("${hpc_nvcc}" HPC_CUDA_VERSION)
if(NOT HPC_CUDA_VERSION VERSION_GREATER_EQUAL ${HPC_CUDA_MINIMUM} OR NOT HPC_CUDA_VERSION VERSION_LESS ${HPC_CUDA_BELOW})
  message(FATAL_ERROR "hpc-common: expected a CUDA compiler from ${HPC_CUDA_MINIMUM} to below ${HPC_CUDA_BELOW}, "
    "got ${hpc_nvcc} (${HPC_CUDA_VERSION})")
endif()
message(STATUS "hpc-common: CUDA ${HPC_CUDA_VERSION} (${hpc_nvcc})")

set(CMAKE_CUDA_COMPILER "${hpc_nvcc}")
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
